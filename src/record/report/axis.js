// ---- axes and curves

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

// The ticks of a logarithmic axis, all as powers of its base, or all as plain numbers if they are
// powers of ten near 1.
function logTicks(base, from, to) {
  const every = Math.max(1, Math.round((to - from) / 4.5)), powers = multiples(every, from, to);
  const plain = base === 10 && powers.every(t => Math.abs(t) <= 3);
  const ticks = powers.map(t => [t, plain ? number(base ** t) : base + superscript(t)]);
  if (base === 2 || every > 1 || ticks.length > 2) return ticks;
  // Less than two decades: also 2 and 5 times each power.
  const more = [];
  for (let t = Math.floor(from); t <= to; t++) {
    for (const m of [1, 2, 5]) {
      const value = Number(m + 'e' + t);  // may underflow to 0 or overflow to Infinity
      if (value > 0 && value < Infinity) more.push([t + Math.log10(m), number(value)]);
    }
  }
  return more.filter(([t]) => t >= from && t <= to);
}

function logAxis(base, low, high) {
  const map = base === 2 ? Math.log2 : Math.log10;
  let from = map(low), to = map(high);
  const least = base === 2 ? 2 : 1;
  if (to - from < least) {
    const middle = (from + to) / 2;
    from = middle - least / 2;
    to = middle + least / 2;
  }
  const pad = (to - from) * 0.06;
  return {map, from: from - pad, to: to + pad, ticks: logTicks(base, from - pad, to + pad)};
}

// An axis: `map` transforms values (linear or a logarithm), `from` and `to` are its ends and
// `ticks` its labels, all in transformed values.
function axisFor(kind, low, high) {
  if (kind !== 'linear') return logAxis(kind === 'log2' ? 2 : 10, low, high);
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

// ---- curves

// The part of a curve that is drawn between two steps: indices of its points, with one on each
// side.
function visible(steps, from, to) {
  const begin = last(steps, from);
  let end = last(steps, to);
  if (end + 1 < steps.length && steps[end] < to) end += 1;
  return Array.from({length: steps.length ? end - begin + 1 : 0}, (_, i) => begin + i);
}

// Reduces points, given by their indices, to at most five for each pixel column: the first, the
// smallest, the largest and the last one, and a gap.
function perPixel(indices, values, pixel) {
  const kept = [];
  let group = [];
  const flush = () => {
    const finite = group.filter(i => values[i] !== null);
    const low = finite.reduce((a, b) => values[b] < values[a] ? b : a, finite[0]),
          high = finite.reduce((a, b) => values[b] > values[a] ? b : a, finite[0]),
          gap = group.find(i => values[i] === null);
    const all = [group[0], low, high, group.at(-1), gap].filter(i => i !== undefined);
    kept.push(...[...new Set(group.length > 5 ? all : group)].sort((a, b) => a - b));
    group = [];
  };
  for (const i of indices) {
    if (group.length && pixel(i) !== pixel(group[0])) flush();
    group.push(i);
  }
  if (group.length) flush();
  return kept;
}

// An average of the values around each step, whose weights fall by e over `span` steps on either
// side, so that it does not lag behind the curve. Gaps remain gaps.
function smoothed(steps, values, span) {
  const sums = values.map(() => 0), weights = values.map(() => 0);
  // From one end to the other; a value counts in one direction only.
  const pass = (indices, own) => {
    let sum = 0, weight = 0, before = steps[indices[0]];
    for (const i of indices) {
      if (values[i] === null) continue;
      const decay = Math.exp(-Math.abs(steps[i] - before) / span);
      before = steps[i];
      sums[i] += sum * decay + (own ? values[i] : 0);
      weights[i] += weight * decay + (own ? 1 : 0);
      sum = sum * decay + values[i];
      weight = weight * decay + 1;
    }
  };
  const order = values.map((value, i) => i);
  pass(order, true);
  pass(order.reverse(), false);
  return values.map(
      (value, i) => value !== null && Number.isFinite(sums[i]) ? sums[i] / weights[i] : null);
}
