// ---- the charts of loss, scale and gradient norm

// Runs of a group have different colours, and different dashes when there are more runs than
// colours.
const placeOf = run => data.runs.filter(other => other.group === run.group).indexOf(run);
const colourOf = run => '--run' + placeOf(run) % RUN_COLOURS;
const dashOf = run => DASHES[Math.floor(placeOf(run) / RUN_COLOURS) % DASHES.length];

// The charts: of which entry of a run, name of the value, smoothed or not, text of a value.
const CHARTS = {
  loss: {title: 'Loss', name: 'loss', height: 250, smooths: true, text: number},
  scale: {title: 'Scale', name: 'scale', height: 190, stairs: true, text: scaleText},
  norm: {title: 'Gradient norm', name: 'gradient norm', height: 170, smooths: true, text: number}
};

// A series for lineChart().
function curve(run, which, chosen) {
  const {stairs, smooths} = CHARTS[which];
  return {
    run,
    name: run.name,
    steps: run[which][0],
    values: run[which][1],
    stairs,
    smooth: smooths ? view.smooth : 0,
    chosen: run === chosen,
    colour: colourOf(run),
    dash: dashOf(run),
    skipped: new Set(run.skips.map(skip => skip[0]))
  };
}

// The text of a series' value at a step, or why there is none. A scale holds until it changes.
function valueText({steps, values, shown, stairs, smooth}, step, text) {
  if (step < steps[0]) return 'begins at step ' + count(steps[0]);
  if (step > steps.at(-1)) return 'ended at step ' + count(steps.at(-1));
  const i = last(steps, step);
  if (steps[i] !== step && !stairs) return '\u2013';
  return text(values[i]) + (smooth ? ` (smoothed ${text(shown[i])})` : '');
}

// Returns a function that gives the lines of a chart's tooltip at a step: the value of every
// visible run, all other values of the selected run, and whether it skipped the step.
function tooltipOf(run, which, series) {
  const skips = new Map(run.skips.map(skip => [skip[0], skip])), several = series.length > 1;
  const selected = series.find(one => one.run === run);
  const listed = series.length > 8 && selected ? [selected] : series;
  return step => {
    const lines = listed.map(
        one =>
            [(several ? one.name + ': ' : '') + CHARTS[which].name + ' ' +
                 valueText(one, step, CHARTS[which].text),
             one === selected && several ? 'chosen' : null, several ? one.colour : null]);
    if (!selected) return lines;
    const others = Object.keys(CHARTS).filter(key => key !== which && run[key][0].length);
    for (const key of several ? [] : others)
      lines.push(
          [CHARTS[key].name + ' ' + valueText(curve(run, key, run), step, CHARTS[key].text)]);
    const skip = skips.get(step);
    if (skip) {
      const who = several ? run.name + ': ' : '';
      lines.push([`${who}skipped at scale ${scaleText(skip[1])}`, 'skip']);
      if (skip[2]) lines.push([skip[2], 'skip']);
    }
    return lines;
  };
}

// Names the runs of a group, which it switches on and off, and explains the marks of skipped steps.
function legend(run, group, which) {
  const press = (other, only) => {
    if (only)
      group.forEach(
          one => one === other ? view.hidden.delete(one.place) : view.hidden.add(one.place));
    else if (!view.hidden.delete(other.place))
      view.hidden.add(other.place);
    render();
  };
  const sample = other => s('svg', {width: 26, height: 8, 'aria-hidden': 'true'}, s('line', {
                              x1: 1,
                              x2: 25,
                              y1: 4,
                              y2: 4,
                              stroke: `var(${colourOf(other)})`,
                              'stroke-width': other === run ? 3 : 2,
                              'stroke-dasharray': dashOf(other) || null
                            }));
  const item = (other, i) =>
      h('li', {},
        h('button', {
          id: `legend-${which}-${i}`,
          'aria-pressed': String(!view.hidden.has(other.place)),
          title: 'Show or hide; with Shift, show only this run',
          onclick: event => press(other, event.shiftKey)
        },
          sample(other), other === run ? h('b', {}, other.name) : other.name));
  const items = group.length < 2 ? [] : group.map(item);
  if (run.skipped && !view.hidden.has(run.place))
    items.push(
        h('li', {},
          s('svg', {width: 6, height: 12, 'aria-hidden': 'true'},
            s('line', {x1: 3, x2: 3, y1: 1, y2: 12, stroke: 'var(--skip)', 'stroke-width': 2})),
          'skipped step' + (group.length > 1 ? ' of ' + run.name : '')));
  return items.length ? h('ul', {class: 'legend'}, items) : null;
}

// Zoom and smoothing, which all charts share.
function controls(range, all) {
  const zoomed = view.zoom && (range[0] > all[0] || range[1] < all[1]);
  const zoom = (id, text, title, factor) =>
      smallButton('zoom-' + id, text, title, () => zoomBy(factor, range, all));
  const spans = [['off', 0], ['10', 10], ['100', 100], ['1000', 1000]];
  return h(
      'div', {class: 'bar', id: 'controls'}, h('span', {class: 'label'}, 'Smooth over'),
      toggle('smooth', 'Smooth over steps', spans, view.smooth, span => view.smooth = span),
      h('span', {class: 'label'}, 'steps'), h('span', {class: 'gap'}),
      h('span', {class: zoomed ? 'label' : 'label mouse'},
        zoomed ? `Steps ${count(range[0])} to ${count(range[1])}` : 'Drag over a chart to zoom'),
      zoom('in', '+', 'Zoom in', 0.5), zoom('out', '\u2212', 'Zoom out', 2),
      zoomed ? zoom('all', 'All steps', 'Show all steps', 0) : null);
}

// Whether a chart's axis is linear or logarithmic: what the reader chose, otherwise what fits. A
// loss that falls by more than a factor of 30 needs a logarithmic axis.
function axisKind(which, series) {
  const log = which === 'scale' ? 'log2' : 'log10';
  if (view.axis[which]) return view.axis[which] === 'log' ? log : 'linear';
  if (which !== 'loss') return log;
  let low = Infinity, high = -Infinity;
  for (const one of series) {
    for (const value of one.values) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return low > 0 && high / low > 30 ? log : 'linear';
}

// One chart with its title, buttons and legend.
function chartSection(which, run, group, shared, note) {
  const {title, height} = CHARTS[which];
  const series = shared.runs.map(other => curve(other, which, run));
  const kind = axisKind(which, series);
  const shown = shared.runs.includes(run) ? run.skips : [];
  return h(
      'section', {},
      heading2(
          title,
          toggle(
              'axis-' + which, 'Axis', [['log', 'log'], ['linear', 'linear']],
              kind === 'linear' ? 'linear' : 'log', value => view.axis[which] = value),
          smallButton(
              'csv-' + which, 'CSV', 'Save the values',
              () => saveCurves(which, series, shared.range)),
          smallButton(
              'png-' + which, 'PNG', 'Save the picture', () => saveChart(which, title, series))),
      note && h('p', {class: 'note'}, note),
      which === 'loss' ? controls(shared.range, shared.all) : null, lineChart({
        ...shared,
        id: which,
        title,
        kind,
        height,
        series,
        skips: shown,
        tooltip: tooltipOf(run, which, series)
      }),
      group.length > 1 || which === 'loss' ? legend(run, group, which) : null);
}

// The charts of loss, scale and gradient norm, with all runs of the group.
function charts(run) {
  const group = data.runs.filter(other => other.group === run.group);
  const runs = group.filter(other => other.loss[0].length && !view.hidden.has(other.place));
  const range = stepRange(runs, view.zoom), all = stepRange(runs, null);
  const shared = {runs, range, all, stops: stopsOf(run, runs)};
  const thinned = run.skips.length < run.skipped ?
      ` Of ${count(run.skipped)} skipped steps, ${count(run.skips.length)} are marked.` :
      '';
  const norms = run.norm[1].some(v => v !== null && v > 0);
  return [
    chartSection(
        'loss', run, group, shared,
        run.skipped ? 'The marks on the axis are skipped steps.' + thinned : null),
    chartSection(
        'scale', run, group, shared,
        'The factor of the loss: raised after steps without overflow, lowered when a ' +
            'gradient overflows.'),
    norms ?
        chartSection('norm', run, group, shared, 'Of the unscaled gradients, before clipping.') :
        null
  ];
}
