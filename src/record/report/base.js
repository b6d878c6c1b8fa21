// Draws the report from the JSON in the page. The files of this folder are concatenated to one
// script, in the order base, chart, layers, page. Text from a run is untrusted: it only ever
// becomes text nodes, never HTML.
'use strict';

// Control characters, including those that change the direction of text.
const CONTROL = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const parse = text => JSON.parse(
    text, (key, value) => typeof value === 'string' ? value.replace(CONTROL, '\ufffd') : value);

const source = document.getElementById('data');
const live = source.dataset.live === '1';
let data = parse(source.textContent);

// The state of the page that survives a redraw.
const view = {
  run: null,        // index of the selected run
  layer: null,      // name of the selected layer
  unscaled: false,  // show gradients without the scale
  gone: false,      // the server of a live report does not answer any more
  open: new Set(),  // titles of the sections that are unfolded
};

const COLOURS = ['--blue', '--green', '--purple', '--gold', '--muted'];
const DASHES = ['', '6 3', '2 3', '8 3 2 3'];
const SHADES =  // must equal kShades in report_data.cc
    '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';
const ZERO = -25, NORMAL = -14, OVER = 16;  // ends of FP16's zones, as powers of two

// All plots have the same margins, so that the same steps are below each other. The left margin
// grows with the longest tick label.
const LEFT = 52, RIGHT = 10;
let left = LEFT;

// Functions that draw plots. They run once their elements are in the page and have a width.
const pending = [];

// ---- building blocks

// Creates an element. Attributes that are null, undefined or false are omitted; those that begin
// with 'on' are event listeners.
function node(space, tag, attributes, children) {
  const made = space ? document.createElementNS('http://www.w3.org/2000/svg', tag) :
                       document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith('on'))
      made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      made.setAttribute(key, value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined));
  return made;
}
// HTML and SVG elements: h('p', {class: 'note'}, 'text', child, ...).
const h = (tag, attributes, ...children) => node(false, tag, attributes, children);
const s = (tag, attributes, ...children) => node(true, tag, attributes, children);

const superscript = n => String(n).replace(
    /[-\d]/g,
    c => c === '-' ? '\u207b' : '\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079'[c]);
const power = n => '2' + superscript(n);
// A number for people; null is the JSON of inf and nan.
function number(x, digits = 5) {
  if (x === null || x === undefined) return 'not finite';
  if (x === 0) return '0';
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-4)
    return x.toExponential(digits - 2).replace('e+', 'e').replace(/\.?0+e/, 'e');
  return String(Number(x.toPrecision(digits)));
}
// Large powers of two as 2^n.
function scaleText(x) {
  if (x === null || x === undefined) return 'not finite';
  const n = Math.log2(x);
  return Number.isInteger(n) && Math.abs(n) > 9 ? power(n) : number(x);
}
function percent(x) {
  if (x === 0) return '0 %';
  return x < 0.0001 ? '< 0.01 %' : (100 * x).toFixed(x < 0.0995 ? 2 : 1) + ' %';
}
const count = n => n.toLocaleString('en');
// Rounded before it is split, so that 59.96 s does not become 60.0 s.
function time(seconds) {
  if (seconds === null) return 'unknown';
  const tenths = Math.round(seconds * 10), whole = Math.round(seconds),
        minutes = Math.round(seconds / 60);
  if (tenths < 600) return (tenths / 10).toFixed(1) + ' s';
  if (whole < 3600) return Math.floor(whole / 60) + ' min ' + whole % 60 + ' s';
  return Math.floor(minutes / 60) + ' h ' + minutes % 60 + ' min';
}
// Names of settings and results: 'final_scale' becomes 'final scale'.
const label = key => key.replaceAll('_', ' ');
const result = (key, value) => key === 'gradients_lost' && value !== null ? percent(value) :
    key === 'final_scale'                                                 ? scaleText(value) :
                                                                            number(value);
const plural = (n, word) => count(n) + ' ' + word + (n === 1 ? '' : 's');

// A table. Columns are [title, 'n' for numbers]; without columns there is no heading. Each row is
// {cells, on}: cells are contents or <td> elements, `on` marks the selected row.
function table(columns, rows) {
  const cell = (content, i) => content instanceof HTMLTableCellElement ?
      content :
      h('td', {class: columns[i] ? columns[i][1] : null}, content);
  return h(
      'table', {},
      columns.length ? h('tr', {}, columns.map(([title, kind]) => h('th', {class: kind}, title))) :
                       null,
      rows.map(({cells, on}) => h('tr', {class: on ? 'on' : null}, cells.map(cell))));
}

// A button that looks like a link, to choose a run or a layer.
const pickButton = (text, title, onclick) => h('button', {class: 'pick', title, onclick}, text);

// ---- tooltip

const tip = document.getElementById('tip');
// Shows the tooltip beside the pointer, within the window.
function showTip(x, y, title, lines) {
  tip.replaceChildren(
      h('b', {}, title), ...lines.map(([text, kind]) => h('div', {class: kind}, text)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  tip.style.left = Math.max(6, Math.min(left, innerWidth - box.width - 6)) + 'px';
  tip.style.top = Math.max(6, Math.min(y + 14, innerHeight - box.height - 6)) + 'px';
}
function hideTip() {
  tip.hidden = true;
  document.querySelectorAll('.cursor').forEach(line => line.setAttribute('visibility', 'hidden'));
}
document.addEventListener('pointerdown', event => {
  if (!event.target.closest('.plot')) hideTip();
});
document.addEventListener('scroll', hideTip, {passive: true});

// Calls `at` with positions in the plot: of the pointer while it hovers, taps or is dragged, and of
// a cursor that the arrow keys move over the plot's width.
function onPlace(plot, at) {
  let key = 0.5;
  const call = (x, y) => {
    const box = plot.getBoundingClientRect();
    at(x - box.left, y - box.top, x, y);
  };
  plot.addEventListener('pointermove', event => call(event.clientX, event.clientY));
  plot.addEventListener('pointerdown', event => call(event.clientX, event.clientY));
  plot.addEventListener('pointerleave', event => {
    if (event.pointerType === 'mouse') hideTip();
  });
  plot.addEventListener('blur', hideTip);
  plot.addEventListener('keydown', event => {
    const move = {ArrowLeft: -0.01, ArrowRight: 0.01, Home: -1, End: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    key = Math.min(1, Math.max(0, key + move));
    const box = plot.getBoundingClientRect();
    call(box.left + left + key * (box.width - left - RIGHT), box.top + box.height / 2);
  });
}

// Index of the last entry of a sorted list that is not above x; 0 if all are above.
function last(list, x) {
  let low = 0, high = list.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x)
      low = middle;
    else
      high = middle;
  }
  return low;
}
function nearest(list, x) {
  const i = last(list, x);
  return i + 1 < list.length && list[i + 1] - x < x - list[i] ? i + 1 : i;
}
