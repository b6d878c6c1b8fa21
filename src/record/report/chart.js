// ---- line charts

// A nice distance between ticks, about `wish` of them over `span`.
function spacing(span, wish) {
  const raw = span / wish, base = 10 ** Math.floor(Math.log10(raw));
  return base * [1, 2, 5, 10].find(m => m * base >= raw * 0.999);
}

// Values are drawn on axis(value): linear or a logarithm.
function axisFor(kind, low, high) {
  if (kind === 'log2' || kind === 'log10') {
    const log = kind === 'log2' ? Math.log2 : Math.log10;
    let from = log(low), to = log(high);
    if (to - from < 1) {
      const middle = (from + to) / 2;
      from = middle - 0.5;
      to = middle + 0.5;
    }
    const pad = (to - from) * 0.06, every = Math.max(1, Math.round(spacing(to - from, 4)));
    const base = kind === 'log2' ? 2 : 10;
    const name = t => Math.abs(t) < 20 / base ? number(base ** t) : base + superscript(t);
    const ticks = [];
    for (let t = Math.ceil(from - pad); t <= to + pad; t++) {
      if (t % every === 0) ticks.push([t, name(t)]);
    }
    if (ticks.length < 3 && kind === 'log10') {  // less than two decades: 2 and 5 as well
      for (let t = Math.floor(from - pad); t <= to + pad; t++) {
        for (const m of [2, 5]) ticks.push([t + Math.log10(m), number(m * 10 ** t)]);
      }
      ticks.splice(0, ticks.length, ...ticks.filter(([t]) => t >= from - pad && t <= to + pad));
    }
    return {map: log, from: from - pad, to: to + pad, ticks};
  }
  const span = high - low || Math.abs(high) || 1, every = spacing(span, 4), ticks = [];
  const from = low - span * 0.06, to = high + span * 0.06;
  for (let t = Math.ceil(from / every) * every; t <= to; t += every)
    ticks.push([t, number(Math.abs(t) < every / 1e6 ? 0 : t)]);
  return {map: x => x, from, to, ticks};
}

function lineChart(options) {
  const plot = h('div', {class: 'plot', tabindex: 0, role: 'img', 'aria-label': options.title});
  pending.push(() => drawLines(plot, options));
  return plot;
}

function drawLines(plot, {series, kind, height, skips, tell}) {
  const width = Math.max(240, plot.clientWidth), left = 52, right = 10, top = 8, bottom = 24;
  const values =
      series.flatMap(one => one.values.filter(v => v !== null && (kind === 'linear' || v > 0)));
  const steps = series.filter(one => one.steps.length).map(one => [one.steps[0], one.steps.at(-1)]);
  if (!values.length) {
    plot.replaceChildren(
        h('p', {class: 'note'}, steps.length ? 'No finite values.' : 'No steps yet.'));
    return;
  }
  const low = values.reduce((a, b) => Math.min(a, b)),
        high = values.reduce((a, b) => Math.max(a, b));
  const first = Math.min(...steps.map(pair => pair[0])),
        end = Math.max(...steps.map(pair => pair[1]), first + 1);
  const axis = axisFor(kind, low, high);
  const X = step => left + (step - first) / (end - first) * (width - left - right);
  const Y = value =>
      top + (axis.to - axis.map(value)) / (axis.to - axis.from) * (height - top - bottom);
  const base = height - bottom;
  const picture =
      s('svg', {width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true'});
  for (const [at, text] of axis.ticks) {
    const y = top + (axis.to - at) / (axis.to - axis.from) * (height - top - bottom);
    picture.append(
        s('line', {class: 'grid', x1: left, x2: width - right, y1: y, y2: y}),
        s('text', {x: left - 7, y: y + 4, 'text-anchor': 'end'}, text));
  }
  const every = Math.max(1, spacing(end - first, width / 110));
  for (let t = Math.ceil(first / every) * every; t <= end; t += every) {
    const anchor = X(t) > width - right - 24 ? 'end' : X(t) < left + 12 ? 'start' : 'middle';
    picture.append(s('text', {x: X(t), y: height - 6, 'text-anchor': anchor}, count(t)));
  }
  for (const one of [...series].sort((a, b) => a.chosen - b.chosen)) {
    let path = '', pen = false;
    one.steps.forEach((step, i) => {
      const value = one.values[i];
      if (value === null || (kind !== 'linear' && value <= 0)) {
        pen = false;
        return;
      }
      const x = X(step).toFixed(1), y = Y(value).toFixed(1);
      path += pen ? (one.stairs ? `H${x}V${y}` : `L${x} ${y}`) : `M${x} ${y}h.01`;
      pen = true;
    });
    picture.append(s('path', {
      d: path,
      fill: 'none',
      stroke: `var(${one.colour})`,
      'stroke-dasharray': one.dash || null,
      'stroke-width': one.chosen ? 2 : 1.4,
      'stroke-linejoin': 'round',
      'stroke-linecap': 'round',
      opacity: one.chosen ? 1 : 0.75
    }));
  }
  picture.append(s('line', {class: 'grid', x1: left, x2: width - right, y1: base, y2: base}));
  picture.append(s('path', {
    class: 'skip',
    'stroke-width': skips.length > 300 ? 1 : 2,
    d: skips.map(skip => `M${X(skip[0]).toFixed(1)} ${base}v-11`).join('')
  }));
  const cursor = s('line', {class: 'cursor', y1: top, y2: base, visibility: 'hidden'});
  picture.append(cursor);
  plot.replaceChildren(picture);
  onPlace(plot, (x, y, pageX, pageY) => {
    let step = Math.round(first + (x - left) / (width - left - right) * (end - first));
    step = Math.max(first, Math.min(end, step));
    const near = skips.length ? skips[nearest(skips.map(skip => skip[0]), step)] : null;
    const skip = near && Math.abs(X(near[0]) - x) < 9 ? near : null;
    if (skip) step = skip[0];
    cursor.setAttribute('x1', X(step));
    cursor.setAttribute('x2', X(step));
    cursor.setAttribute('visibility', 'visible');
    showTip(pageX, pageY, 'Step ' + count(step), tell(step, skip));
  });
}
