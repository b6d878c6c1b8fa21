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

// Runs of a group have different colours, and different dashes when there are more runs than
// colours.
const placeOf = run => data.runs.filter(other => other.group === run.group).indexOf(run);
const colourOf = run => COLOURS[placeOf(run) % COLOURS.length];
const dashOf = run => DASHES[Math.floor(placeOf(run) / COLOURS.length) % DASHES.length];

// A series for lineChart().
function curve(run, points, stairs, chosen) {
  return {
    name: run.name,
    steps: points[0],
    values: points[1],
    stairs,
    chosen: run === chosen,
    colour: colourOf(run),
    dash: dashOf(run)
  };
}

// Returns a function that gives the lines of a chart's tooltip at a step.
function tooltipOf(run, group) {
  return (step, skip) => {
    const lines = [];
    for (const other of group.length > 6 ? [run] : group) {
      if (!other.loss[0].length) continue;
      const i = nearest(other.loss[0], step), near = other.loss[0][i];
      const at = near === step ? '' : ' (step ' + count(near) + ')';
      lines.push(
          [(group.length > 1 ? other.name + ': ' : '') + 'loss ' + number(other.loss[1][i]) + at]);
    }
    if (run.scale[0].length)
      lines.push(['scale ' + scaleText(run.scale[1][last(run.scale[0], step)])]);
    if (skip) lines.push(['skipped at scale ' + scaleText(skip[1]), 'skip'], [skip[2], 'skip']);
    return lines;
  };
}

// Names the runs of a group and explains the marks of skipped steps.
function legend(run, group) {
  const items = group.length < 2 ?
      [] :
      group.map(
          other =>
              h('li', {}, s('svg', {width: 26, height: 8, 'aria-hidden': 'true'}, s('line', {
                              x1: 1,
                              x2: 25,
                              y1: 4,
                              y2: 4,
                              stroke: `var(${colourOf(other)})`,
                              'stroke-width': other === run ? 3 : 2,
                              'stroke-dasharray': dashOf(other) || null
                            })),
                other === run ? h('b', {}, other.name) : other.name));
  if (run.skipped)
    items.push(
        h('li', {},
          s('svg', {width: 6, height: 12, 'aria-hidden': 'true'},
            s('line', {x1: 3, x2: 3, y1: 1, y2: 12, stroke: 'var(--skip)', 'stroke-width': 2})),
          'skipped step' + (group.length > 1 ? ' of ' + run.name : '')));
  return items.length ? h('ul', {class: 'legend'}, items) : null;
}

// The charts of loss, scale and gradient norm, with all runs of the group.
function charts(run) {
  const group = data.runs.filter(other => other.group === run.group);
  const losses = group.flatMap(other => other.loss[1].filter(v => v !== null));
  const low = losses.reduce((a, b) => Math.min(a, b), Infinity),
        high = losses.reduce((a, b) => Math.max(a, b), -Infinity);
  // A loss that falls by more than a factor of 30 needs a logarithmic axis.
  const lossKind = low > 0 && high / low > 30 ? 'log10' : 'linear';
  const tooltip = tooltipOf(run, group), skips = run.skips;
  const make = (title, note, which, kind, height, stairs) =>
      h('section', {}, h('h2', {}, title), note && h('p', {class: 'note'}, note), lineChart({
          title,
          kind,
          height,
          skips,
          tooltip,
          series: group.map(other => curve(other, other[which], stairs, run))
        }),
        group.length > 1 || which === 'loss' ? legend(run, group) : null);
  const thinned = run.skips.length < run.skipped ?
      ` Of ${count(run.skipped)} skipped steps, ${count(run.skips.length)} are marked.` :
      '';
  const norms = run.norm[1].filter(v => v !== null && v > 0);
  return [
    make(
        'Loss', run.skipped ? 'The marks on the axis are skipped steps.' + thinned : null, 'loss',
        lossKind, 250, false),
    make(
        'Scale',
        'The factor of the loss: raised after steps without overflow, lowered when a gradient overflows.',
        'scale', 'log2', 190, true),
    norms.length ? make(
                       'Gradient norm', 'Of the unscaled gradients, before clipping.', 'norm',
                       'log10', 170, false) :
                   null
  ];
}

// A section that the reader can unfold; remembered across redraws.
function fold(title, content) {
  const remember = event => event.target.open ? view.open.add(title) : view.open.delete(title);
  return h(
      'details', {open: view.open.has(title) ? '' : null, ontoggle: remember},
      h('summary', {}, title), content);
}

// The key figures of a run, its settings and its skipped steps.
function facts(run) {
  const fact = (value, what, kind) =>
      h('div', {class: kind}, h('b', {}, value), h('span', {}, what));
  const share = run.count ? ' (' + percent(run.skipped / run.count) + ')' : '';
  const list = run.results.map(([key, value]) => fact(result(key, value), label(key)));
  if (!list.length && run.loss[1].length) list.push(fact(number(run.loss[1].at(-1)), 'loss'));
  list.push(
      fact(count(run.count), 'steps'),
      fact(count(run.skipped) + (run.skipped ? share : ''), 'skipped'));
  if (!run.results.some(([key]) => key === 'final_scale') && run.scale[1].length)
    list.push(fact(scaleText(run.scale[1].at(-1)), 'scale'));
  list.push(fact(time(run.seconds), 'of training'));
  const bounds = run.bounds;
  if (bounds && bounds.overflow) {
    list.push(fact(
        bounds.overflow,
        bounds.doublings === null || bounds.doublings < 0 ?
            'first to overflow: it already has' :
            `first to overflow, after ${Math.floor(bounds.doublings)} more doublings of the scale`,
        'text'));
  }
  if (bounds && bounds.underflow) {
    list.push(fact(
        bounds.underflow,
        bounds.lost > 0 ? `first to underflow: FP16 loses ${percent(bounds.lost)} of it` :
                          `first to underflow: ${percent(bounds.subnormal)} of it subnormal`,
        'text'));
  }
  return h(
      'section', {},
      data.runs.length > 1 ? h('h2', {}, run.name, '\u2002', ending(run)) :
                             h('h2', {}, 'At a glance'),
      h('div', {class: 'facts'}, list),
      run.settings.length ?
          fold(
              'Settings',
              h('div', {class: 'wide'},
                table([], run.settings.map(([key, value]) => ({cells: [label(key), value]}))))) :
          null,
      run.skips.length ? fold(
                             'Skipped steps',
                             h('div', {class: 'wide list'},
                               table(
                                   [['step', 'n'], ['scale', 'n'], ['culprit']],
                                   run.skips.slice(0, 500).map(
                                       ([step, scale, culprit]) =>
                                           ({cells: [count(step), scaleText(scale), culprit]}))))) :
                         null);
}

// The results of all runs of a group.
function compareTable(group) {
  const runs = data.runs.filter(run => run.group === group);
  const keys = [...new Set(runs.flatMap(run => run.results.map(pair => pair[0])))];
  const value = (run, key) => {
    const found = run.results.find(pair => pair[0] === key);
    return found ? result(key, found[1]) : '\u2013';
  };
  return h(
      'section', {}, h('h2', {}, group || 'Runs'),
      h('div', {class: 'wide'},
        table(
            [
              ['run'], ['ended'], ...keys.map(key => [label(key), 'n']), ['steps', 'n'],
              ['skipped', 'n'], ['time', 'n']
            ],
            runs.map(run => ({
                       on: run === data.runs[view.run],
                       cells: [
                         pickButton(run.name, run.place, () => choose(data.runs.indexOf(run))),
                         ending(run, true), ...keys.map(key => value(run, key)), count(run.count),
                         count(run.skipped), time(run.seconds)
                       ]
                     })))));
}

// ---- the page

// Selects a run.
function choose(index) {
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

// Draws the whole page from `data` and `view`.
function render() {
  // Keep the scroll positions of the page and of its lists.
  const scroll = scrollY,
        lists = [...document.querySelectorAll('.list')].map(list => list.scrollTop);
  hideTip();
  left = LEFT;
  if (view.run === null || !data.runs[view.run]) {
    // Initially, select the first run in which scaling is interesting.
    const best = data.runs.findIndex(run => run.skipped > 0 || run.name.includes('dynamic'));
    view.run = Math.max(0, best);
  }
  const run = data.runs[view.run], many = data.runs.length > 1;
  document.getElementById('head').replaceChildren(
      h('h1', {}, data.title, many ? null : ['\u2002', ending(run)]),
      h('p', {class: 'sub'}, many ? plural(data.runs.length, 'run') : plural(run.count, 'step'),
        ' \u00b7 started ', run.started.replace('T', ' ').replace(/\..*/, ' UTC'),
        run.cut && !going(run) ?
            ' \u00b7 the last line of its history is incomplete and was ignored' :
            '',
        view.gone ? ' \u00b7 the server of this page has stopped; this is the last state' : ''));
  const groups = [...new Set(data.runs.map(one => one.group))];
  document.getElementById('main').replaceChildren(
      ...[leftOut(), many ? groups.map(compareTable) : [], advice(run), facts(run), notes(run),
          charts(run), layerSection(run)]
          .flat()
          .filter(Boolean),
      h('footer', {},
        live ?
            'Served by Headroom while the run is training.' :
            'Written by Headroom. This file is self-contained and does not access the network.'));
  pending.splice(0).forEach(draw => draw());
  document.querySelectorAll('.list').forEach((list, i) => list.scrollTop = lists[i] || 0);
  scrollTo(0, scroll);
}

// The page is not redrawn while a tooltip or a selection is open.
const busy = () => !tip.hidden || document.activeElement.tagName === 'SELECT';

// Asks the server for newer data until all runs have ended or it has failed three times in a row.
let lines = -1, stale = false;
async function poll(failures) {
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
  if (!over) setTimeout(poll, failures ? 3000 : 1500, failures);
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
