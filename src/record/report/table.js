// ---- tables that can be sorted and saved

// Orders numbers and texts; what is missing comes last in either direction.
function order(a, b, down) {
  const none = x => x === null || x === undefined || Number.isNaN(x);
  if (none(a) || none(b)) return none(a) - none(b);
  const difference = typeof a === 'number' && typeof b === 'number' ?
      a - b :
      String(a).localeCompare(String(b), 'en', {numeric: true});
  return down ? -difference : difference;
}

// A heading that sorts by its column: numbers from the largest down first, then up, then as given.
function heading(id, [title, kind], column) {
  if (kind === 'picture') return h('th', {}, title);
  const by = view.sort[id], mine = by && by.column === column, first = kind === 'n';
  const next = !mine ? {column, down: first} : by.down === first ? {column, down: !first} : null;
  const press = () => {
    view.sort[id] = next;
    render();
  };
  return h(
      'th', {class: kind, 'aria-sort': mine ? (by.down ? 'descending' : 'ascending') : null},
      h('button', {id: `${id}-by-${column}`, class: 'sort', onclick: press}, title));
}

// A table. Columns are [title, 'n' for numbers or 'picture']; without columns there is no heading.
// Each row is {cells, keys, on}: cells are contents or <td> elements, keys the values to sort by,
// and `on` marks the selected row.
function table(id, columns, rows) {
  const cell = (content, i) => content instanceof HTMLTableCellElement ?
      content :
      h('td', {class: columns[i] ? columns[i][1] : null}, content);
  const by = view.sort[id];
  const sorted =
      by ? [...rows].sort((a, b) => order(a.keys[by.column], b.keys[by.column], by.down)) : rows;
  return h(
      'table', {},
      columns.length ? h('tr', {}, columns.map((column, i) => heading(id, column, i))) : null,
      sorted.map(({cells, on}) => h('tr', {class: on ? 'on' : null}, cells.map(cell))));
}

// ---- files

// Quotes where CSV needs it. An apostrophe keeps spreadsheets from running text as a formula.
function csvCell(value) {
  if (value === null || value === undefined) return '';
  if (typeof value === 'number') return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? '\'' + value : String(value);
  return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}
const csv = rows => rows.map(row => row.map(csvCell).join(',') + '\r\n').join('');

// Saves a file under a name that contains the report's title.
function save(name, contents, type) {
  const url = URL.createObjectURL(new Blob([contents], {type}));
  const title = data.title.replace(/[^\w.-]+/g, '-').slice(0, 80);
  h('a', {href: url, download: `${title}-${name}`}).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
function saveTable(name, columns, rows) {
  const texts = row => row.filter((cell, i) => columns[i][1] !== 'picture');
  const titles = texts(columns).map(([title]) => title);
  save(name + '.csv', csv([titles, ...rows.map(row => texts(row.keys))]), 'text/csv');
}
