// ---- pictures

// A copy of a chart's drawing that does not need the page's style sheet.
function standalone(picture) {
  const copy = picture.cloneNode(true), from = [...picture.querySelectorAll('*')];
  const names = ['fill', 'stroke', 'stroke-width', 'font-size', 'font-family', 'visibility'];
  [...copy.querySelectorAll('*')].forEach((element, i) => {
    const style = getComputedStyle(from[i]);
    for (const name of names) element.style.setProperty(name, style.getPropertyValue(name));
  });
  copy.querySelectorAll('.cursor, .zoom').forEach(element => element.remove());
  return copy;
}

// The drawing of a chart with its title and the names of its curves, as SVG.
function figure(picture, title, series) {
  const width = picture.clientWidth, height = picture.clientHeight, line = 20, top = 34;
  const body = getComputedStyle(document.body), font = body.fontFamily;
  const copy = standalone(picture);
  copy.setAttribute('y', top);
  const text = (x, y, words, size, weight) =>
      s('text',
        {x, y, fill: style('--ink'), 'font-size': size, 'font-family': font, 'font-weight': weight},
        words);
  const names = series.length < 2 ? [] : series.map((one, i) => {
    const y = top + height + 8 + i * line;
    return [
      s('line', {
        x1: left,
        x2: left + 26,
        y1: y,
        y2: y,
        stroke: style(one.colour),
        'stroke-width': 2,
        'stroke-dasharray': one.dash || null
      }),
      text(left + 34, y + 4, one.name, 13, 400)
    ];
  });
  const tall = top + height + names.length * line + 8;
  return s(
      'svg', {xmlns: 'http://www.w3.org/2000/svg', width, height: tall},
      s('rect', {width, height: tall, fill: style('--card')}), text(12, 23, title, 15, 600), copy,
      names.flat());
}

// Saves a chart as a PNG image of twice its size on the screen.
function saveChart(id, title, series) {
  const picture = document.querySelector(`#plot-${id} svg`);
  if (!picture) return;
  const drawing = figure(picture, title, series), image = new Image();
  image.onload = () => {
    const canvas = document.createElement('canvas');
    canvas.width = image.width * 2;
    canvas.height = image.height * 2;
    canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob(blob => save(id + '.png', blob, 'image/png'));
  };
  image.src = 'data:image/svg+xml;charset=utf-8,' +
      encodeURIComponent(new XMLSerializer().serializeToString(drawing));
}

// Saves the points of the curves between two steps.
function saveCurves(id, series, [from, to]) {
  const rows = [['run', 'step', id, 'skipped']];
  for (const one of series) {
    one.steps.forEach((step, i) => {
      if (step >= from && step <= to)
        rows.push([one.name, step, one.values[i], one.skipped.has(step) ? 1 : 0]);
    });
  }
  save(id + '.csv', csv(rows), 'text/csv');
}
