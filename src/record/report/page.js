// ---- sections

// Whether a live report's run is still training.
const going = run => live && !view.gone && !run.end;

// How a run ended, in full or shortened for a table.
function ending(run, brief) {
  const [text, kind] = going(run) ? ['training', 'on'] :
      run.end                     ? [run.end, run.end === 'finished' ? '' : 'off'] :
                                    ['no end recorded: killed, or still running', 'off'];
  return h(
      'span', {class: 'chip ' + kind, title: brief ? text : null},
      brief ? text.replace(/:.*/s, '') : text);
}

// A section that the reader can unfold; remembered across redraws.
function fold(title, content) {
  const remember = event => event.target.open ? view.open.add(title) : view.open.delete(title);
  return h(
      'details', {open: view.open.has(title) ? '' : null, ontoggle: remember},
      h('summary', {}, title), content);
}

const fact = (value, what, kind) => h('div', {class: kind}, h('b', {}, value), h('span', {}, what));

// The speed of a run; while it is training, that of the last half minute and the time left.
function speed(run) {
  const now = going(run), rate = now ? run.rate : run.count / run.seconds;
  if (!(rate > 0) || rate === Infinity) return [];
  const list = [fact(number(rate, 3), 'steps per second')], done = run.loss[0].at(-1);
  if (now && run.planned > done)
    list.push(fact(time((run.planned - done) / rate), `left of ${plural(run.planned, 'step')}`));
  return list;
}

// Which tensors bound the scale.
function boundFacts({bounds, range}) {
  if (!bounds) return [];
  const list = [], {overflow, underflow, lost, subnormal} = bounds;
  const doublings = Math.floor(bounds.doublings);
  if (overflow) {
    list.push(fact(
        overflow,
        bounds.doublings === null || bounds.doublings < 0 ?
            'first to overflow: it already has' :
            `first to overflow, after ${plural(doublings, 'more doubling')} of the scale`,
        'text'));
  }
  if (underflow) {
    list.push(fact(
        underflow,
        lost > 0 ? `first to underflow: ${range.name} loses ${percent(lost)} of it` :
                   `first to underflow: ${percent(subnormal)} of it subnormal in ${range.name}`,
        'text'));
  }
  return list;
}

// A list of the first skipped steps whose culprits are known.
function skipTable(run) {
  const rows =
      run.skips.filter(skip => skip[2])
          .slice(0, 500)
          .map(
              ([step, scale, culprit]) => (
                  {keys: [step, scale, culprit], cells: [count(step), scaleText(scale), culprit]}));
  return h(
      'div', {class: 'wide list'},
      table('skips', [['step', 'n'], ['scale', 'n'], ['culprit']], rows));
}

// The key figures of a run, its settings and its skipped steps.
function facts(run) {
  const share = run.count ? ' (' + percent(run.skipped / run.count) + ')' : '';
  const list = run.results.map(([key, value]) => fact(result(key, value), label(key)));
  if (!list.length && run.loss[1].length) list.push(fact(number(run.loss[1].at(-1)), 'loss'));
  list.push(
      fact(count(run.count), 'steps'),
      fact(count(run.skipped) + (run.skipped ? share : ''), 'skipped'));
  if (!run.results.some(([key]) => key === 'final_scale') && run.scale[1].length)
    list.push(fact(scaleText(run.scale[1].at(-1)), 'scale'));
  list.push(fact(time(run.seconds), 'of training'), ...speed(run), ...boundFacts(run));
  const settings = run.settings.map(([key, value]) => ({cells: [label(key), value]}));
  return h(
      'section', {},
      data.runs.length > 1 ? h('h2', {}, run.name, '\u2002', ending(run)) :
                             h('h2', {}, 'At a glance'),
      h('div', {class: 'facts'}, list),
      settings.length ?
          fold('Settings', h('div', {class: 'wide'}, table('settings', [], settings))) :
          null,
      run.skips.length ? fold('Skipped steps', skipTable(run)) : null);
}

// The results of all runs of a group.
function compareTable(group, index) {
  const runs = data.runs.filter(run => run.group === group), id = 'runs' + index;
  const keys = [...new Set(runs.flatMap(run => run.results.map(pair => pair[0])))];
  const value = (run, key) => {
    const found = run.results.find(pair => pair[0] === key);
    return found ? found[1] : undefined;
  };
  const text = (run, key) =>
      value(run, key) === undefined ? '\u2013' : result(key, value(run, key));
  const columns = [
    ['run'], ['ended'], ...keys.map(key => [label(key), 'n']), ['steps', 'n'], ['skipped', 'n'],
    ['time', 'n'], ['advice', 'n']
  ];
  const rows =
      runs.map(run => ({
                 on: run === data.runs[view.run],
                 keys: [
                   run.name, run.end, ...keys.map(key => value(run, key)), run.count, run.skipped,
                   run.seconds, run.advice.findings.length
                 ],
                 cells: [
                   pickButton(run.name, run.place, () => choose(data.runs.indexOf(run))),
                   ending(run, true), ...keys.map(key => text(run, key)), count(run.count),
                   count(run.skipped), time(run.seconds), run.advice.findings.length || '\u2013'
                 ]
               }));
  return h(
      'section', {},
      heading2(
          group || 'Runs',
          smallButton(
              'csv-' + id, 'CSV', 'Save the table',
              () => saveTable(group || 'runs', columns, rows))),
      h('div', {class: 'wide'}, table(id, columns, rows)));
}

// ---- the page

// Selects a run.
function choose(index) {
  if (data.runs[index].group !== data.runs[view.run].group) view.zoom = null;
  view.run = index;
  view.layer = null;
  render();
}

const notes = run => run.notes.length === 0 ?
    null :
    h('ul', {class: 'notes'},
      run.notes.map(([step, text]) => h('li', {}, `Step ${step}: ${text}`)));

const leftOut = () => data.left_out.length === 0 ?
    null :
    h('ul', {class: 'notes'}, data.left_out.map(why => h('li', {}, `A run is left out. ${why}`)));

// The title of the page, and how its run ended if there is only one.
function drawHead(run, many) {
  document.getElementById('head').replaceChildren(
      h('h1', {}, data.title, many ? null : ['\u2002', ending(run)]),
      h('p', {class: 'sub'}, many ? plural(data.runs.length, 'run') : plural(run.count, 'step'),
        ' \u00b7 started ', run.started.replace('T', ' ').replace(/\..*/, ' UTC'),
        run.cut && !going(run) ?
            ' \u00b7 the last line of its history is incomplete and was ignored' :
            '',
        view.gone ? ' \u00b7 the server of this page has stopped; this is the last state' : ''));
}

// Draws the whole page from `data` and `view`.
function render() {
  // Keep the focus, and the scroll positions of the page and of its lists.
  const scroll = scrollY, focus = document.activeElement.id,
        lists = [...document.querySelectorAll('.list')].map(list => list.scrollTop);
  hideTip();
  left = LEFT;
  cursors = [];
  if (view.run === null || !data.runs[view.run]) {
    // Initially, select the first run in which scaling is interesting.
    const best = data.runs.findIndex(run => run.skipped > 0 || run.name.includes('dynamic'));
    view.run = Math.max(0, best);
  }
  const run = data.runs[view.run], many = data.runs.length > 1;
  drawHead(run, many);
  const groups = [...new Set(data.runs.map(one => one.group))];
  document.getElementById('main').replaceChildren(
      ...[leftOut(), many ? groups.map(compareTable) : [], advice(run, many), facts(run),
          notes(run), charts(run), layerSection(run)]
          .flat()
          .filter(Boolean),
      h('footer', {},
        live ?
            'Served by Headroom while the run is training.' :
            'Written by Headroom. This file is self-contained and does not access the network.'));
  pending.splice(0).forEach(draw => draw());
  document.querySelectorAll('.list').forEach((list, i) => list.scrollTop = lists[i] || 0);
  const focused = focus && document.getElementById(focus);
  if (focused) focused.focus({preventScroll: true});
  scrollTo(0, scroll);
}

// The page is not redrawn while a tooltip or a list is open, or a range is being selected.
const busy = () => !tip.hidden || view.choosing || view.dragging;

// Asks the server for newer data until all runs have ended or it has failed three times in a row.
let lines = -1, stale = false;
async function poll(failures) {
  const began = performance.now();
  try {
    const answer = await fetch('data?lines=' + lines, {cache: 'no-store'});
    if (answer.status === 200) {
      lines = Number(answer.headers.get('X-Lines'));
      const {place} = data.runs[view.run];
      data = parse(await answer.text());
      view.run = data.runs.findIndex(run => run.place === place);
      stale = true;
    } else if (answer.status !== 204) {
      throw new Error(answer.status);
    }
    failures = 0;
  } catch (error) {
    failures += 1;
  }
  view.gone = failures >= 3;
  const over = view.gone || data.runs.every(run => run.end);
  if (over || (stale && !busy())) {
    stale = false;
    render();
  }
  // A long run has much data: at most a twentieth of the time is spent on reading it.
  const wait = Math.max(failures ? 3000 : 1500, 20 * (performance.now() - began));
  if (!over) setTimeout(poll, wait, failures);
}

render();
if (live) poll(0);
let drawnWidth = innerWidth;
addEventListener('resize', () => {
  if (innerWidth !== drawnWidth) {
    drawnWidth = innerWidth;
    render();
  }
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', render);
