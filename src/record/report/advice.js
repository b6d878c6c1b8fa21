// ---- advice

// What the rules of diagnose() found in a run, the most important first. `many`: it is one of
// several.
function advice(run, many) {
  const {summary, findings} = run.advice;
  if (run.count === 0 || (going(run) && !findings.length)) return null;  // too early to judge
  const powers = text => text.replace(/2\^(-?\d+)/g, (all, n) => power(n));
  const item = finding => h(
      'li', {}, h('p', {}, powers(finding.problem), ' ', h('span', {class: 'rule'}, finding.rule)),
      h('p', {}, h('b', {}, powers(finding.change))),
      finding.command ? h('code', {}, 'headroom train \u2026 ' + finding.command) : null,
      finding.code ? h('code', {}, finding.code) : null);
  return h(
      'section', {class: 'advice'}, h('h2', {}, many ? 'Advice on ' + run.name : 'Advice'),
      findings.length ?
          h('ol', {}, findings.map(item)) :
          h('p', {class: summary.startsWith('Nothing') ? 'fine' : ''}, powers(summary)));
}
