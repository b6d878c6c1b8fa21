// ---- line charts

// A round distance between ticks that puts about `wish` of them on `span`.
function spacing(span, wish) {
  const raw = span / wish, base = 10 ** Math.floor(Math.log10(raw));
  return base * [1, 2, 5, 10].find(m => m * base >= raw * 0.999);
}

// The multiples of `every` between `from` and `to`, without duplicates where floating-point numbers
// are further apart than `every`.
function multiples(every, from, to) {
  const first = Math.ceil(from / every), length = Math.max(0, Math.floor(to / every) - first + 1);
  return [...new Set(Array.from({length}, (_, i) => (first + i) * every))];
}

// An axis: `map` transforms values (linear or a logarithm), `from` and `to` are its ends and
// `ticks` its labels, all in transformed values.
function axisFor(kind, low, high) {
  if (kind === 'log2' || kind === 'log10') {
    const log = kind === 'log2' ? Math.log2 : Math.log10;
    let from = log(low), to = log(high);
    if (to - from < 1) {
      const middle = (from + to) / 2;
      from = middle - 0.5;
      to = middle + 0.5;
    }
    const pad = (to - from) * 0.06, every = Math.max(1, Math.round((to - from) / 4));
    const base = kind === 'log2' ? 2 : 10;
    const name = t => Math.abs(t) < 20 / base ? number(base ** t) : base + superscript(t);
    let ticks = multiples(every, from - pad, to + pad).map(t => [t, name(t)]);
    if (every === 1 && ticks.length < 3 &&
        kind === 'log10') {  // less than two decades: also 2 and 5
      for (let t = Math.floor(from - pad); t <= to + pad; t++) {
        for (const m of [2, 5]) {
          const value = Number(m + 'e' + t);  // may underflow to 0 or overflow to Infinity
          if (value > 0 && value < Infinity) ticks.push([t + Math.log10(m), number(value)]);
        }
      }
      ticks = ticks.filter(([t]) => t >= from - pad && t <= to + pad);
    }
    return {map: log, from: from - pad, to: to + pad, ticks};
  }
  // Differences of huge values would overflow.
  const most = Math.max(Math.abs(low), Math.abs(high)), shrink = most > 1e300 ? 1e-9 : 1;
  const map = x => x * shrink, bottom = map(low), span = map(high) - bottom;
  if (span < 1e-300) {  // a constant: its value is the only tick
    const pad = Math.max(Math.abs(bottom) / 2, 1e-300);
    return {map, from: bottom - pad, to: bottom + pad, ticks: [[bottom, number(low)]]};
  }
  const every = spacing(span, 4), from = bottom - span * 0.06, to = map(high) + span * 0.06;
  const digits = Math.max(5, Math.ceil(Math.log10(map(most) / every)) + 2);
  const ticks = multiples(every, from, to)
                    .filter(t => Number.isFinite(t / shrink))
                    .map(t => [t, number(t / shrink, digits)]);
  return {map, from, to, ticks};
}

// Width of a label in pixels.
const ruler = document.createElement('canvas').getContext('2d');
function widthOf(text) {
  ruler.font = '12px ' + getComputedStyle(document.body).fontFamily;
  return ruler.measureText(text).width;
}

// A chart of several series over the same steps. The drawing is deferred, see `pending`.
function lineChart(options) {
  const {series, kind, title} = options;
  const plot = h('div', {class: 'plot', tabindex: 0, role: 'img', 'aria-label': title});
  const values =
      series.flatMap(one => one.values.filter(v => v !== null && (kind === 'linear' || v > 0)));
  if (!values.length) {
    const any = series.some(one => one.steps.length);
    plot.append(h('p', {class: 'note'}, any ? 'No finite values.' : 'No steps yet.'));
    return plot;
  }
  const low = values.reduce((a, b) => Math.min(a, b)),
        high = values.reduce((a, b) => Math.max(a, b));
  const axis = axisFor(kind, low, high);
  left = Math.max(left, ...axis.ticks.map(([t, text]) => Math.ceil(widthOf(text)) + 10));
  pending.push(() => drawLines(plot, axis, options));
  return plot;
}

// Draws a chart into its element: grid, steps, curves, skipped steps, and a cursor with a tooltip.
function drawLines(plot, axis, {series, kind, height, skips, tooltip}) {
  const width = Math.max(240, plot.clientWidth), right = RIGHT, top = 8, bottom = 24;
  const steps = series.filter(one => one.steps.length).map(one => [one.steps[0], one.steps.at(-1)]);
  // Above 2^53, neighbouring numbers are more than 1 apart.
  const first = Math.min(...steps.map(pair => pair[0])),
        least = Math.max(1, Math.abs(first) * 2 ** -50),
        end = Math.max(...steps.map(pair => pair[1]), first + least);
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
  const room = Math.max(110, 2 * widthOf(count(end)));
  const every = Math.max(1, spacing(end - first, width / room)),
        ticks = multiples(every, first, end);
  for (const t of ticks.length ? ticks : [first]) {
    const half = widthOf(count(t)) / 2, x = X(t);
    const anchor = x > width - right - half ? 'end' : x < left + half ? 'start' : 'middle';
    picture.append(s('text', {x, y: height - 6, 'text-anchor': anchor}, count(t)));
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
      // A lone point is drawn as a tiny line, which the round line cap makes visible.
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
    // The cursor snaps to a skipped step within 9 pixels.
    const skip = near && Math.abs(X(near[0]) - x) < 9 ? near : null;
    if (skip) step = skip[0];
    cursor.setAttribute('x1', X(step));
    cursor.setAttribute('x2', X(step));
    cursor.setAttribute('visibility', 'visible');
    showTip(pageX, pageY, 'Step ' + count(step), tooltip(step, skip));
  });
}
