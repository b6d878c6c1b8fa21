// ---- layers: where the gradients are in FP16's range

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shadeAt = (text, i) => SHADES.indexOf(text[i]) / 61;  // the square root of a share

// FP16's zones: name, first and last exponent, colour and opacity of the band.
const ZONES = [
  ['zero in FP16', -Infinity, ZERO, '--orange', 0.2], ['subnormal', ZERO, NORMAL, '--gold', 0.14],
  ['normal', NORMAL, OVER, null, 0], ['overflow', OVER, Infinity, '--purple', 0.2]
];

// A column of a layer's heat map: [exponent, share of the nonzero elements] for each exponent.
function column(layer, c) {
  const list = [];
  for (let r = 0; r < layer.rows; r++) {
    const level = shadeAt(layer.cells, c * layer.rows + r);
    if (level > 0) list.push([layer.from + r, level * level]);
  }
  return list;
}

// Draws the heat map of a layer: snapshots from left to right, exponents from bottom to top, with
// strips for inf and nan above and for zeros below.
function drawHeat(plot, run, layer) {
  const canvas = plot.firstChild, ratio = devicePixelRatio || 1,
        columns = run.snapshots.steps.length;
  // The scale of each snapshot in octaves, by which "unscaled" moves the gradients down.
  const shift =
      run.snapshots.scales.map(scale => view.unscaled && scale > 0 ? Math.log2(scale) : 0);
  const lowShift = Math.min(...shift), highShift = Math.max(...shift);
  const low = Math.floor(Math.min(layer.rows ? layer.from : 0, ZERO - 3) - highShift);
  const high = Math.ceil(Math.max(layer.rows ? layer.from + layer.rows : 0, OVER + 2) - lowShift);
  const width = Math.max(240, plot.clientWidth), right = RIGHT, strip = 13, top = strip + 5,
        bottom = 24;
  const step = Math.max(3, Math.min(7, 380 / (high - low))), inner = step * (high - low);
  const height = top + inner + strip + 5 + bottom;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  pen.font = '12px system-ui, sans-serif';
  // Whole pixels, so that there are neither gaps nor overlaps between cells.
  const X = c => Math.round(left + c / columns * (width - left - right));
  const Y = e => Math.round(top + (high - e) * step);
  const ink = style('--blue'), muted = style('--muted'), purple = style('--purple');
  const zones =
      ZONES.map(([name, from, to, colour, alpha]) => [from, to, colour && style(colour), alpha]);
  const fill = (colour, alpha, x, y, w, tall) => {
    pen.globalAlpha = alpha;
    pen.fillStyle = colour;
    pen.fillRect(x, y, w, tall);
  };
  const write = (text, x, y, align, colour) => {
    pen.globalAlpha = 1;
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.fillText(text, x, y);
  };
  for (let c = 0; c < columns; c++) {
    const x = X(c), w = X(c + 1) - x;
    for (const [from, to, colour, alpha] of zones) {
      const a = Y(Math.min(high, to - shift[c])), b = Y(Math.max(low, from - shift[c]));
      if (colour && b > a) fill(colour, alpha, x, a, w, b - a);
    }
    for (const [e, share] of column(layer, c)) {
      const above = Y(e + 1 - shift[c]), alpha = 0.12 + 0.88 * Math.min(1, Math.sqrt(share) * 1.6);
      fill(ink, alpha, x, above, w, Y(e - shift[c]) - above);
    }
    const bad = shadeAt(layer.badCells, c), zeros = shadeAt(layer.zeroCells, c);
    fill(muted, 0.1, x, 0, w, strip);
    fill(muted, 0.1, x, top + inner + 5, w, strip);
    if (bad > 0) fill(purple, 0.4 + 0.6 * bad, x, 0, w, strip);
    if (zeros > 0) fill(ink, 0.12 + 0.88 * zeros, x, top + inner + 5, w, strip);
  }
  write('inf, nan', left - 7, 11, 'right', muted);
  write('= 0', left - 7, top + inner + 16, 'right', muted);
  for (let e = Math.ceil(low / 8) * 8; e <= high; e += 8)
    write(power(e), left - 7, Y(e) + 4, 'right', muted);
  // Label the zones at their positions in the last snapshot, if the labels fit.
  for (const [name, from, to] of ZONES) {
    const end = shift[columns - 1], a = Y(Math.min(high, to - end)),
          b = Y(Math.max(low, from - end));
    if (b - a < 14) continue;
    const x = width - right - 6, y = (name === 'normal' ? a + 16 : (a + b) / 2 + 4),
          half = pen.measureText(name).width;
    fill(style('--card'), 0.75, x - half - 4, y - 12, half + 8, 17);
    write(name, x, y, 'right', style('--ink'));
  }
  const every = Math.max(1, Math.ceil(columns / (width / 90)));
  for (let c = 0; c < columns; c += every)
    write(
        count(run.snapshots.steps[c]), Math.max(left + 8, (X(c) + X(c + 1)) / 2), height - 6,
        'center', muted);
  plot.place = (x, y, pageX, pageY) => {
    const c = Math.max(
        0, Math.min(columns - 1, Math.floor((x - left) / (width - left - right) * columns)));
    const e = Math.floor(high - (y - top) / step + shift[c]);
    showTip(pageX, pageY, 'Step ' + count(run.snapshots.steps[c]), heatTooltip(run, layer, c, e));
  };
}

// The lines of the heat map's tooltip for a column and an exponent.
function heatTooltip(run, layer, c, e) {
  const shares = column(layer, c), zeros = shadeAt(layer.zeroCells, c);
  const sum = (from, to) =>
      shares.reduce((all, [at, share]) => all + (at >= from && at < to ? share : 0), 0);
  const here = shares.find(([at]) => at === e), total = sum(-Infinity, Infinity) || 1;
  const about = share => share ? 'about ' + percent(share) : 'none';
  const lines = [];
  if (here) lines.push([`${power(e)} to ${power(e + 1)} as stored: ${about(here[1] / total)}`]);
  lines.push(
      ['scale ' + scaleText(run.snapshots.scales[c])],
      ['lost in FP16: ' + about(sum(-Infinity, ZERO) / total)],
      ['subnormal in FP16: ' + about(sum(ZERO, NORMAL) / total)],
      ['exactly zero: ' + about(zeros * zeros)]);
  if (shadeAt(layer.badCells, c) > 0) lines.push(['inf or nan', 'skip']);
  return lines;
}

// The last snapshot as a small histogram over FP16's whole range.
function miniature(run, layer) {
  const width = 150, height = 24, low = -30, high = 18, X = e => (e - low) / (high - low) * width;
  const bars = column(layer, run.snapshots.steps.length - 1);
  const most = Math.max(...bars.map(bar => bar[1]), 1e-9);
  const bands =
      ZONES.filter(([name, from, to, colour]) => colour).map(([
                                                               name, from, to, colour, opacity
                                                             ]) => {
        const x = X(Math.max(from, low));
        return s(
            'rect',
            {x, width: X(Math.min(to, high)) - x, y: 0, height, fill: `var(${colour})`, opacity});
      });
  let path = '';
  for (const [e, share] of bars) {
    if (e < low || e >= high) continue;
    path += `M${(X(e) + X(e + 1)) / 2} ${height}v${
        - Math.max(1, share / most * (height - 2)).toFixed(1)}`;
  }
  return s(
      'svg', {width, height, 'aria-hidden': 'true'}, bands,
      s('path', {d: path, stroke: 'var(--blue)', 'stroke-width': 2.5}));
}

// The heat map of the selected layer and a table of all layers.
function layerSection(run) {
  if (!run.layers.length) return null;
  const layer = run.layers.find(one => one.name === view.layer) || run.layers[0];
  const plot =
      h('div', {
        class: 'plot',
        tabindex: 0,
        role: 'img',
        'aria-label': 'Gradient magnitudes of ' + layer.name + ' over steps'
      },
        h('canvas', {}));
  pending.push(() => {
    drawHeat(plot, run, layer);
    onPlace(plot, (...place) => plot.place(...place));
  });
  const pick = name => {
    view.layer = name;
    render();
  };
  const toggle = (text, value) =>
      h('button', {
        'aria-pressed': String(view.unscaled === value),
        onclick: () => {
          view.unscaled = value;
          render();
        }
      },
        text);
  const room = one => one.bad ? 'overflowed' :
      one.top > 0             ? (Math.log2(65504 / one.top)).toFixed(1) :
                                '\u2013';
  return h(
      'section', {}, h('h2', {}, 'Gradients by layer'),
      h('p', {class: 'note'},
        'The magnitudes of the gradients, as powers of two, at every snapshot: the stronger the ',
        'colour, the larger the share of the nonzero values. The bands are those of FP16: below ',
        `${power(ZERO)} a value becomes zero, below ${power(NORMAL)} it loses digits, from 65520 `,
        'on it is inf.'),
      h('div', {class: 'bar'},
        h('label',
          {for: 'layer'
          },
          'Layer'),
        h('select', {id: 'layer', onchange: event => pick(event.target.value)},
          run.layers.map(
              one =>
                  h('option', {value: one.name, selected: one === layer ? '' : null}, one.name))),
        h('span', {class: 'toggle', role: 'group', 'aria-label': 'Size'},
          toggle('as stored', false), toggle('unscaled', true))),
      plot,
      h('p', {class: 'note'},
        'All layers, the worst underflow first. Lost and subnormal are the largest shares of the ',
        'nonzero values in any snapshot. Largest and room are those of the last snapshot; room is ',
        'how often the scale can still be doubled.'),
      h('div', {class: 'wide list'},
        table(
            [
              ['layer'], ['last snapshot, 2\u207b\u00b3\u2070 to 2\u00b9\u2078'],
              ['lost in FP16', 'n'], ['subnormal', 'n'], ['exactly zero', 'n'], ['largest', 'n'],
              ['room', 'n']
            ],
            run.layers.map(
                one => ({
                  on: one === layer,
                  cells: [
                    pickButton(one.name, one.name, () => pick(one.name)), miniature(run, one),
                    h('td', {class: one.lost > 0.01 ? 'n bad' : 'n'}, percent(one.lost)),
                    percent(one.subnormal), percent(one.zeros), number(one.top),
                    h('td', {class: one.bad ? 'n bad' : 'n'}, room(one))
                  ]
                })))));
}
