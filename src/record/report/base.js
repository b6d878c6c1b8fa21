// Draws the report from the JSON in the page. The files of this folder are concatenated to one
// script, in the order of kReportScripts. Text from a run is untrusted: it only ever becomes text
// nodes, never HTML.
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
  run: null,          // index of the selected run
  layer: null,        // name of the selected layer
  unscaled: false,    // show gradients without the scale
  gone: false,        // the server of a live report does not answer any more
  open: new Set(),    // titles of the sections that are unfolded
  hidden: new Set(),  // folders of the runs that the legend has switched off
  zoom: null,         // [first, last] step of the charts; null: all
  smooth: 0,          // steps over which curves are smoothed
  axis: {},           // of a chart, if the reader has chosen it: 'log' or 'linear'
  sort: {},           // of a table, if the reader has chosen it: {column, down}
  choosing: false,    // a list of choices is open
  dragging: false,    // a range of steps is being selected
};

const RUN_COLOURS = 6;  // of the style sheet, see run_colours() in page.cc
const DASHES = ['', '6 3', '2 3', '8 3 2 3'];
const SHADES =  // must equal kShades in report_data.cc
    '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';

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
// Powers of two other than 1 as 2^n.
function scaleText(x) {
  if (x === null || x === undefined) return 'not finite';
  const n = Math.log2(x);
  return Number.isInteger(n) && n !== 0 ? power(n) : number(x);
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

// A button that looks like a link, to choose a run or a layer.
const pickButton = (text, title, onclick) => h('button', {class: 'pick', title, onclick}, text);

// A group of buttons of which one is pressed: choices are [text, value].
function toggle(id, name, choices, value, set) {
  const button = ([text, choice]) =>
      h('button', {
        id: `${id}-${choice}`,
        'aria-pressed': String(choice === value),
        onclick: () => {
          set(choice);
          render();
        }
      },
        text);
  return h('span', {class: 'toggle', role: 'group', 'aria-label': name}, choices.map(button));
}
const smallButton = (id, text, title, onclick) =>
    h('button', {id, class: 'small', title, onclick}, text);

// The title of a section, with buttons at its end.
const heading2 = (title, ...buttons) =>
    h('div', {class: 'title'}, h('h2', {}, title), h('span', {class: 'bar'}, buttons));

// ---- tooltip

const tip = document.getElementById('tip');
// Shows the tooltip beside the pointer, within the window. Each line is [text, class, colour].
function showTip(x, y, title, lines) {
  const mark = colour => colour ? h('i', {style: `background:var(${colour})`}) : null;
  tip.replaceChildren(
      h('b', {}, title),
      ...lines.map(([text, kind, colour]) => h('div', {class: kind}, mark(colour), text)));
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

// Calls `at` with positions in the plot: of the pointer while it hovers, taps or is dragged.
function onPointer(plot, at) {
  const call = event => {
    const box = plot.getBoundingClientRect();
    at(event.clientX - box.left, event.clientY - box.top, event.clientX, event.clientY);
  };
  plot.addEventListener('pointermove', call);
  plot.addEventListener('pointerdown', call);
  plot.addEventListener('pointerleave', event => {
    if (event.pointerType === 'mouse') hideTip();
  });
  plot.addEventListener('blur', hideTip);
}

// Moves a cursor over `places`, which has a function that returns their number, with the arrow keys
// (with Shift by tens), Home and End. Calls `at` with the place and a position for the tooltip.
function onKeys(plot, places, at) {
  let place = null;
  plot.addEventListener('keydown', event => {
    const many = event.shiftKey ? 10 : 1, end = places() - 1;
    const move = {ArrowLeft: -many, ArrowRight: many, Home: -Infinity, End: Infinity}[event.key];
    if (!move || end < 0) return;
    event.preventDefault();
    if (place === null) place = Math.floor(end / 2);
    place = Math.max(0, Math.min(end, place + move));
    const box = plot.getBoundingClientRect();
    at(place, x => box.left + x, box.top + box.height / 2);
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
