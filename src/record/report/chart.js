// ---- line charts

// Charts that are on the page: each moves its cursor to a step.
let cursors = [];

// The steps at which the cursor stops: those that all runs have which had them, and the skipped
// steps of the selected run. Compared runs are thus always shown at the same step. Runs that have
// hardly any step in common are shown at the steps of the selected one.
function stopsOf(run, runs) {
  const counts = new Map(), spans = runs.map(({loss: [steps]}) => [steps[0], steps.at(-1)]);
  for (const {loss: [steps]} of runs)
    for (const step of steps) counts.set(step, (counts.get(step) || 0) + 1);
  const covering = step => spans.filter(([from, to]) => from <= step && step <= to).length;
  const own = runs.includes(run) ? run.loss[0] : [...counts.keys()];
  let stops = [...counts.keys()].filter(step => counts.get(step) === covering(step));
  if (stops.length < Math.min(20, own.length)) stops = own;
  const skips = runs.includes(run) ? run.skips.map(skip => skip[0]) : [];
  return [...new Set([...stops, ...skips])].sort((a, b) => a - b);
}

// The steps of the horizontal axis: those of all runs, or the part that was zoomed into.
function stepRange(runs, zoom) {
  const ends = runs.map(({loss: [steps]}) => [steps[0], steps.at(-1)]);
  const first = Math.min(...ends.map(end => end[0])), end = Math.max(...ends.map(end => end[1]));
  const whole = [first, end];
  if (!zoom) return whole;
  const part = [Math.max(first, zoom[0]), Math.min(end, zoom[1])];
  return part[0] < part[1] ? part : whole;
}

// Zooms by a factor around a step; a factor of 0 shows all steps again.
function zoomBy(factor, range, all, middle = (range[0] + range[1]) / 2) {
  const from = Math.round(middle - (middle - range[0]) * factor),
        to = Math.round(middle + (range[1] - middle) * factor);
  view.zoom =
      factor === 0 || (from <= all[0] && to >= all[1]) ? null : [from, Math.max(to, from + 1)];
  render();
}

// A chart of several series over the same steps. The drawing is deferred, see `pending`.
function lineChart(options) {
  const {id, series, kind, title, range} = options;
  const plot = h('div', {
    id: 'plot-' + id,
    class: 'plot',
    tabindex: 0,
    role: 'img',
    'aria-label': title + ' over steps. Arrow keys move the cursor, + and - zoom, Escape shows all.'
  });
  let low = Infinity, high = -Infinity, any = false;
  for (const one of series) {
    one.shown = one.smooth ? smoothed(one.steps, one.values, one.smooth) : one.values;
    one.points = visible(one.steps, ...range);
    any = any || one.points.length > 0;
    for (const values of one.smooth ? [one.values, one.shown] : [one.values]) {
      for (const i of one.points) {
        const value = values[i];
        if (value === null || (kind !== 'linear' && value <= 0)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  }
  if (low > high) {
    plot.append(
        h('p', {class: 'note'},
          !any                  ? 'No steps yet.' :
              kind === 'linear' ? 'No finite values.' :
                                  'No finite values above 0.'));
    return plot;
  }
  const axis = axisFor(kind, low, high);
  left = Math.max(left, ...axis.ticks.map(([t, text]) => Math.ceil(widthOf(text)) + 10));
  pending.push(() => drawChart(plot, axis, options));
  return plot;
}

// Where steps and values are in a chart, in pixels.
function geometry(plot, axis, {height, range}) {
  const width = Math.max(240, plot.clientWidth), top = 8, base = height - 24;
  // Above 2^53, neighbouring numbers are more than 1 apart.
  const [first, last] = range, least = Math.max(1, Math.abs(first) * 2 ** -50),
                end = Math.max(last, first + least), across = width - left - RIGHT;
  const row = at => top + (axis.to - at) / (axis.to - axis.from) * (base - top);
  return {
    width,
    height,
    top,
    base,
    first,
    end,
    X: step => left + (step - first) / (end - first) * across,
    Y: value => row(axis.map(value)),
    row,
    stepAt: x => first + Math.max(0, Math.min(1, (x - left) / across)) * (end - first)
  };
}

// The ticks of both axes, with lines for those of the vertical one.
function drawGrid(picture, axis, {width, height, base, first, end, X, row}) {
  for (const [at, text] of axis.ticks) {
    const y = row(at);
    picture.append(
        s('line', {class: 'grid', x1: left, x2: width - RIGHT, y1: y, y2: y}),
        s('text', {x: left - 7, y: y + 4, 'text-anchor': 'end'}, text));
  }
  const room = Math.max(110, 2 * widthOf(count(end)));
  const every = Math.max(1, spacing(end - first, width / room)),
        ticks = multiples(every, first, end);
  for (const t of ticks.length ? ticks : [first]) {
    const half = widthOf(count(t)) / 2, x = X(t);
    const anchor = x > width - RIGHT - half ? 'end' : x < left + half ? 'start' : 'middle';
    picture.append(s('text', {x, y: height - 6, 'text-anchor': anchor}, count(t)));
  }
  picture.append(s('line', {class: 'grid', x1: left, x2: width - RIGHT, y1: base, y2: base}));
}

// The path of a curve through the points that are visible, with as much detail as there are pixels.
function pathOf({steps, points, stairs}, values, kind, {X, Y}) {
  let path = '', pen = false;
  for (const i of perPixel(points, values, j => Math.round(X(steps[j])))) {
    const value = values[i];
    if (value === null || (kind !== 'linear' && value <= 0)) {
      pen = false;
      continue;
    }
    const x = X(steps[i]).toFixed(1), y = Y(value).toFixed(1);
    // A lone point is drawn as a tiny line, which the round line cap makes visible.
    path += pen ? (stairs ? `H${x}V${y}` : `L${x} ${y}`) : `M${x} ${y}h.01`;
    pen = true;
  }
  return path;
}

// The curves, the selected one on top, each with its unsmoothed values faintly behind it.
function drawCurves(picture, {series, kind, id}, place) {
  const clip = 'clip-' + id;
  picture.append(s('clipPath', {id: clip}, s('rect', {
                     x: left - 2,
                     y: 0,
                     width: Math.max(0, place.width - left - RIGHT + 4),
                     height: place.height
                   })));
  const draw = (one, values, width, opacity) => s('path', {
    d: pathOf(one, values, kind, place),
    class: 'curve',
    fill: 'none',
    'clip-path': `url(#${clip})`,
    stroke: `var(${one.colour})`,
    'stroke-dasharray': one.dash || null,
    'stroke-width': width,
    'stroke-linejoin': 'round',
    'stroke-linecap': 'round',
    opacity
  });
  for (const one of [...series].sort((a, b) => a.chosen - b.chosen)) {
    if (one.smooth) picture.append(draw(one, one.values, 1, 0.28));
    picture.append(draw(one, one.shown, one.chosen ? 2 : 1.4, one.chosen ? 1 : 0.8));
  }
}

// Draws a chart into its element: grid, curves, skipped steps, and a cursor with a tooltip.
function drawChart(plot, axis, options) {
  const place = geometry(plot, axis, options), {width, height, top, base, first, end, X} = place;
  const picture =
      s('svg', {width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true'});
  drawGrid(picture, axis, place);
  drawCurves(picture, options, place);
  const skips = options.skips.filter(([step]) => step >= first && step <= end);
  picture.append(s('path', {
    class: 'skip',
    'stroke-width': skips.length > 300 ? 1 : 2,
    d: skips.map(([step]) => `M${X(step).toFixed(1)} ${base}v-11`).join('')
  }));
  const cursor = s('line', {class: 'cursor', y1: top, y2: base, visibility: 'hidden'});
  const chosen = s('rect', {class: 'zoom', y: top, height: base - top, width: 0});
  picture.append(cursor, chosen);
  plot.replaceChildren(picture);
  cursors.push(step => {
    const inside = step >= first && step <= end;
    cursor.setAttribute('x1', X(step));
    cursor.setAttribute('x2', X(step));
    cursor.setAttribute('visibility', inside ? 'visible' : 'hidden');
  });
  listen(plot, chosen, place, skips.map(skip => skip[0]), options);
}

// The tooltip and the cursor follow the pointer and the keys, and a drag zooms.
function listen(plot, chosen, place, skips, {stops, tooltip, range, all}) {
  const {first, end, X, stepAt} = place;
  const shown = stops.filter(step => step >= first && step <= end);
  let current = null;  // the step that is shown
  const show = (step, pageX, pageY) => {
    current = step;
    cursors.forEach(move => move(step));
    showTip(pageX, pageY, 'Step ' + count(step), tooltip(step));
  };
  onPointer(plot, (x, y, pageX, pageY) => {
    if (!shown.length) return;
    // A skipped step within three pixels comes before the steps around it.
    const wanted = stepAt(x), near = skips.length ? skips[nearest(skips, wanted)] : null;
    const snaps = near !== null && Math.abs(X(near) - x) <= 3;
    show(snaps ? near : shown[nearest(shown, wanted)], pageX, pageY);
  });
  onKeys(plot, () => shown.length, (i, pageX, pageY) => show(shown[i], pageX(X(shown[i])), pageY));
  plot.addEventListener('keydown', event => {
    const factor = {'+': 0.5, '=': 0.5, '-': 2, '0': 0, Escape: 0}[event.key];
    if (factor === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    zoomBy(factor, range, all, current === null ? undefined : current);
  });
  plot.addEventListener('dblclick', () => zoomBy(0, range, all));
  onDrag(plot, chosen, (from, to) => {
    view.zoom = [Math.round(stepAt(from)), Math.round(stepAt(to))];
    if (view.zoom[0] === view.zoom[1]) view.zoom[1] += 1;
    render();
  });
}

// Calls `done` with both ends, in pixels from left to right, when a mouse or a pen was dragged over
// the plot; a finger scrolls the page and moves the tooltip.
function onDrag(plot, chosen, done) {
  let from = null, to = null;
  const at = event => event.clientX - plot.getBoundingClientRect().left;
  const ends = () => [Math.min(from, to), Math.max(from, to)];
  const stop = () => {
    from = null;
    view.dragging = false;
    chosen.setAttribute('width', 0);
  };
  plot.addEventListener('pointerdown', event => {
    if (event.pointerType === 'touch' || event.button !== 0) return;
    from = to = at(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener('pointermove', event => {
    if (from === null) return;
    to = at(event);
    view.dragging = Math.abs(to - from) > 5;
    chosen.setAttribute('x', ends()[0]);
    chosen.setAttribute('width', view.dragging ? ends()[1] - ends()[0] : 0);
  });
  plot.addEventListener('pointerup', () => {
    const [low, high] = ends(), dragged = from !== null && view.dragging;
    stop();
    if (dragged) done(low, high);
  });
  plot.addEventListener('pointercancel', stop);
}
