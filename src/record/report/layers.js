// ---- layers: where the gradients are in the range of the run's precision

const style = name => {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const other = value.match(/^var\((--\w+)\)$/);
  return other ? style(other[1]) : value;
};
const shadeAt = (text, i) => SHADES.indexOf(text[i]) / 61;  // the square root of a share

// The zones of a run's precision: name, first and last exponent, colour and opacity of the band.
const zonesOf = ({name, lost, normal, overflow}) => [
    [`zero in ${name}`, -Infinity, lost, '--orange', 0.2],
    ['subnormal', lost, normal, '--gold', 0.14], ['normal', normal, overflow, null, 0],
    ['overflow', overflow, Infinity, '--purple', 0.2]];

// A column of a layer's heat map: [exponent, share of the nonzero elements] for each exponent.
function column(layer, c) {
  const list = [];
  for (let r = 0; r < layer.rows; r++) {
    const level = shadeAt(layer.cells, c * layer.rows + r);
    if (level > 0) list.push([layer.from + r, level * level]);
  }
  return list;
}

// The snapshots that are shown, as indices: those between the steps that were zoomed into.
function columnsOf(run) {
  const all = run.snapshots.steps.map((step, c) => c);
  const inside = all.filter(c => {
    const step = run.snapshots.steps[c];
    return !view.zoom || (step >= view.zoom[0] && step <= view.zoom[1]);
  });
  return inside.length ? inside : all;
}

// The exponents of a heat map: those of the layer, and the zones unless they are far away, as
// those of BF16 and FP32 are.
function exponents(run, layer, shifts) {
  const {lost, overflow} = run.range, far = 40;
  let low = layer.rows ? layer.from : 0, high = layer.rows ? layer.from + layer.rows : 1;
  low = low - lost < far ? Math.min(low, lost - 3) : low - 4;
  high = overflow - high < far ? Math.max(high, overflow + 2) : high + 4;
  return [Math.floor(low - Math.max(...shifts)), Math.ceil(high - Math.min(...shifts))];
}

// Where the columns and exponents of a heat map are on its canvas, in pixels.
function heatGeometry(plot, run, layer) {
  const columns = columnsOf(run);
  // The scale of each snapshot in octaves, by which "unscaled" moves the gradients down.
  const shifts = columns.map(c => {
    const scale = run.snapshots.scales[c];
    return view.unscaled && scale > 0 ? Math.log2(scale) : 0;
  });
  const [low, high] = exponents(run, layer, shifts);
  const width = Math.max(240, plot.clientWidth), strip = 13, top = strip + 5;
  const step = Math.max(3, Math.min(7, 380 / (high - low))), below = top + step * (high - low);
  return {
    columns,
    shifts,
    low,
    high,
    width,
    strip,
    step,
    top,
    below,  // the end of the exponents; the strip of zeros follows
    height: below + strip + 5 + 24,
    // Whole pixels, so that there are neither gaps nor overlaps between cells.
    X: k => Math.round(left + k / columns.length * (width - left - RIGHT)),
    Y: e => Math.round(top + (high - e) * step)
  };
}

// A pen for a canvas of this size, sharp on every screen.
function penOf(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  pen.font = '12px ' + getComputedStyle(document.body).fontFamily;
  return {
    measure: text => pen.measureText(text).width,
    fill: (colour, alpha, x, y, w, tall) => {
      pen.globalAlpha = alpha;
      pen.fillStyle = colour;
      pen.fillRect(x, y, w, tall);
    },
    write: (text, x, y, align, colour) => {
      pen.globalAlpha = 1;
      pen.fillStyle = colour;
      pen.textAlign = align;
      pen.fillText(text, x, y);
    }
  };
}

// The zones, the shares of the exponents, and the strips for inf and nan above and zeros below.
function paintCells(pen, run, layer, place) {
  const {columns, shifts, low, high, strip, below, X, Y} = place;
  const ink = style('--blue'), muted = style('--muted'), purple = style('--purple');
  const zones =
      zonesOf(run.range).filter(zone => zone[3]).map(([, from, to, colour,
                                                       alpha]) => [from, to, style(colour), alpha]);
  columns.forEach((c, k) => {
    const x = X(k), w = X(k + 1) - x, shift = shifts[k];
    for (const [from, to, colour, alpha] of zones) {
      const a = Y(Math.min(high, to - shift)), b = Y(Math.max(low, from - shift));
      if (b > a) pen.fill(colour, alpha, x, a, w, b - a);
    }
    for (const [e, share] of column(layer, c)) {
      const above = Y(e + 1 - shift), alpha = 0.12 + 0.88 * Math.min(1, Math.sqrt(share) * 1.6);
      pen.fill(ink, alpha, x, above, w, Y(e - shift) - above);
    }
    const bad = shadeAt(layer.badCells, c), zeros = shadeAt(layer.zeroCells, c);
    pen.fill(muted, 0.1, x, 0, w, strip);
    pen.fill(muted, 0.1, x, below + 5, w, strip);
    if (bad > 0) pen.fill(purple, 0.4 + 0.6 * bad, x, 0, w, strip);
    if (zeros > 0) pen.fill(ink, 0.12 + 0.88 * zeros, x, below + 5, w, strip);
  });
}

// The ticks, and the names of the zones at their positions in the last snapshot, if they fit.
function paintLabels(pen, run, place) {
  const {columns, shifts, low, high, width, height, below, X, Y} = place, muted = style('--muted');
  pen.write('inf, nan', left - 7, 11, 'right', muted);
  pen.write('= 0', left - 7, below + 16, 'right', muted);
  for (let e = Math.ceil(low / 8) * 8; e <= high; e += 8)
    pen.write(power(e), left - 7, Y(e) + 4, 'right', muted);
  const shift = shifts.at(-1);
  for (const [name, from, to] of zonesOf(run.range)) {
    const a = Y(Math.min(high, to - shift)), b = Y(Math.max(low, from - shift));
    if (b - a < 14) continue;
    const x = width - RIGHT - 6, y = (name === 'normal' ? a + 16 : (a + b) / 2 + 4),
          half = pen.measure(name);
    pen.fill(style('--card'), 0.75, x - half - 4, y - 12, half + 8, 17);
    pen.write(name, x, y, 'right', style('--ink'));
  }
  const every = Math.max(1, Math.ceil(columns.length / (width / 90)));
  for (let k = 0; k < columns.length; k += every) {
    const text = count(run.snapshots.steps[columns[k]]), half = pen.measure(text) / 2;
    const x = (X(k) + X(k + 1)) / 2;
    pen.write(
        text, Math.min(Math.max(left + half, x), width - half - 2), height - 6, 'center', muted);
  }
}

// Draws the heat map of a layer: snapshots from left to right, exponents from bottom to top.
function drawHeat(plot, run, layer) {
  const place = heatGeometry(plot, run, layer), {columns, shifts, high, step, top, width} = place;
  const pen = penOf(plot.firstChild, width, place.height);
  paintCells(pen, run, layer, place);
  paintLabels(pen, run, place);
  const show = (k, e, pageX, pageY) => showTip(
      pageX, pageY, 'Step ' + count(run.snapshots.steps[columns[k]]),
      heatTooltip(run, layer, columns[k], e));
  onPointer(plot, (x, y, pageX, pageY) => {
    const share = (x - left) / (width - left - RIGHT);
    const k = Math.max(0, Math.min(columns.length - 1, Math.floor(share * columns.length)));
    show(k, Math.floor(high - (y - top) / step + shifts[k]), pageX, pageY);
  });
  onKeys(
      plot, () => columns.length,
      (k, pageX, pageY) => show(k, null, pageX((place.X(k) + place.X(k + 1)) / 2), pageY));
}

// The lines of the heat map's tooltip for a snapshot and an exponent.
function heatTooltip(run, layer, c, e) {
  const shares = column(layer, c), zeros = shadeAt(layer.zeroCells, c);
  const {name, lost, normal} = run.range;
  const sum = (from, to) =>
      shares.reduce((all, [at, share]) => all + (at >= from && at < to ? share : 0), 0);
  const here = shares.find(([at]) => at === e), total = sum(-Infinity, Infinity) || 1;
  const about = share => share ? 'about ' + percent(share) : 'none';
  const lines = [];
  if (here) lines.push([`${power(e)} to ${power(e + 1)} as stored: ${about(here[1] / total)}`]);
  lines.push(
      ['scale ' + scaleText(run.snapshots.scales[c])],
      [`lost in ${name}: ${about(sum(-Infinity, lost) / total)}`],
      [`subnormal in ${name}: ${about(sum(lost, normal) / total)}`],
      ['exactly zero: ' + about(zeros * zeros)]);
  if (shadeAt(layer.badCells, c) > 0) lines.push(['inf or nan', 'skip']);
  return lines;
}

// The exponents of the small histograms: FP16's whole range, or those that occur in the run.
function miniatureRange(run) {
  if (run.range.name === 'FP16') return [-30, 18];
  const used = run.layers.filter(layer => layer.rows);
  const low = Math.min(0, ...used.map(layer => layer.from)) - 2,
        high = Math.max(0, ...used.map(layer => layer.from + layer.rows)) + 2;
  return [low, high];
}

// The last snapshot as a small histogram.
function miniature(run, layer, [low, high]) {
  const width = 150, height = 24, X = e => (e - low) / (high - low) * width;
  const bars = column(layer, run.snapshots.steps.length - 1);
  const most = Math.max(...bars.map(bar => bar[1]), 1e-9);
  const bands =
      zonesOf(run.range)
          .filter(([, from, to, colour]) => colour && from < high && to > low)
          .map(([, from, to, colour, opacity]) => {
            const x = X(Math.max(from, low)), end = X(Math.min(to, high));
            return s('rect', {x, width: end - x, y: 0, height, fill: `var(${colour})`, opacity});
          });
  const inside = bars.filter(([e]) => e >= low && e < high);
  const path = inside.map(([e, share]) => {
    const tall = Math.max(1, share / most * (height - 2)).toFixed(1);
    return `M${((X(e) + X(e + 1)) / 2).toFixed(1)} ${height}v-${tall}`;
  });
  return s(
      'svg', {width, height, 'aria-hidden': 'true'}, bands,
      s('path', {d: path.join(''), stroke: 'var(--blue)', 'stroke-width': 2.5}));
}

// How often the scale can still be doubled until a layer overflows; -Infinity if it has.
const roomOf = (run, layer) => layer.bad ? -Infinity :
    layer.top > 0                        ? Math.log2(run.range.largest / layer.top) :
                                           null;

// A table of all layers.
function layerTable(run, layer, pick) {
  const span = miniatureRange(run), name = run.range.name;
  const columns = [
    ['layer'], [`last snapshot, ${power(span[0])} to ${power(span[1])}`, 'picture'],
    [`lost in ${name}`, 'n'], ['subnormal', 'n'], ['exactly zero', 'n'], ['largest', 'n'],
    ['room', 'n']
  ];
  const rows = run.layers.map(one => {
    const room = roomOf(run, one);
    return {
      on: one === layer,
      keys: [one.name, null, one.lost, one.subnormal, one.zeros, one.top, room],
      cells: [
        pickButton(one.name, one.name, () => pick(one.name)), miniature(run, one, span),
        h('td', {class: one.lost > 0.01 ? 'n bad' : 'n'}, percent(one.lost)),
        percent(one.subnormal), percent(one.zeros), number(one.top),
        h('td', {class: one.bad ? 'n bad' : 'n'},
          one.bad           ? 'overflowed' :
              room === null ? '\u2013' :
                              room.toFixed(1))
      ]
    };
  });
  return [columns, rows];
}

// The choice of the layer, and of the size in which its gradients are shown.
function layerControls(run, layer, pick) {
  const choosing = on => () => view.choosing = on;
  return h(
      'div', {class: 'bar'},
      h('label',
        {for: 'layer'
        },
        'Layer'),
      h('select', {
        id: 'layer',
        onpointerdown: choosing(true),
        onkeydown: choosing(true),
        onblur: choosing(false),
        onchange: event => pick(event.target.value)
      },
        run.layers.map(
            one => h('option', {value: one.name, selected: one === layer ? '' : null}, one.name))),
      toggle(
          'unscaled', 'Size', [['as stored', false], ['unscaled', true]], view.unscaled,
          value => view.unscaled = value));
}

// The heat map of the selected layer and a table of all layers.
function layerSection(run) {
  if (!run.layers.length) return null;
  const layer = run.layers.find(one => one.name === view.layer) || run.layers[0];
  const plot =
      h('div', {
        id: 'plot-layer',
        class: 'plot',
        tabindex: 0,
        role: 'img',
        'aria-label': 'Gradient magnitudes of ' + layer.name + ' over steps'
      },
        h('canvas', {}));
  pending.push(() => drawHeat(plot, run, layer));
  const pick = name => {
    view.layer = name;
    view.choosing = false;
    render();
  };
  const {name, lost, normal, overflow} = run.range;
  const [columns, rows] = layerTable(run, layer, pick);
  return h(
      'section', {},
      heading2(
          'Gradients by layer',
          smallButton(
              'png-layer', 'PNG', 'Save the picture',
              () => plot.firstChild.toBlob(blob => save('layer.png', blob, 'image/png'))),
          smallButton(
              'csv-layers', 'CSV', 'Save the table', () => saveTable('layers', columns, rows))),
      h('p', {class: 'note'},
        'The magnitudes of the gradients, as powers of two, at every snapshot: the stronger the ',
        `colour, the larger the share of the nonzero values. The bands are those of ${
            name}: below `,
        `${power(lost)} a value becomes zero, below ${power(normal)} it loses digits, from `,
        `${name === 'FP16' ? '65520' : power(overflow)} on it is inf.`),
      layerControls(run, layer, pick), plot,
      h('p', {class: 'note'},
        'All layers, the worst underflow first. Lost and subnormal are the largest shares of the ',
        'nonzero values in any snapshot. Largest and room are those of the last snapshot; room is ',
        'how often the scale can still be doubled.'),
      h('div', {class: 'wide list'}, table('layers', columns, rows)));
}
