// ---- advice

// What the rules of diagnose() found in a run, the most important first.
function advice(run) {
  const {summary, findings} = run.advice;
  if (run.count === 0 || (going(run) && !findings.length)) return null;  // too early to judge
  const item = finding =>
      h('li', {}, h('p', {}, finding.problem, ' ', h('span', {class: 'rule'}, finding.rule)),
        h('p', {}, h('b', {}, finding.change)),
        finding.command ? h('code', {}, 'headroom train \u2026 ' + finding.command) : null,
        finding.code ? h('code', {}, finding.code) : null);
  return h(
      'section', {class: 'advice'}, h('h2', {}, 'Advice'),
      findings.length ? h('ol', {}, findings.map(item)) : h('p', {class: 'fine'}, summary));
}
