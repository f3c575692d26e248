// The table of runs, kept row by row so that focus survives an update, and a run's own page.
(() => {
  "use strict";
  const { $, el, put, say, plain, short, power, fixed, percent, duration, number, tile, colour, theme, plot, forget } = iso;
  const PAGE = innerWidth < 640 ? 20 : 100;
  const progress = (r) => (r.steps ? `${short(r.step, 4)} / ${short(r.steps, 4)}` : short(r.step, 4));
  const COLUMNS = [
    ["Run", (r) => r.name], ["Size", (r) => r.N, (r) => r.size], ["Status", (r) => r.status], ["Step", (r) => r.step / (r.steps || 1), progress],
    ["ETA", (r) => r.eta_s, (r) => duration(r.eta_s)], ["N", (r) => r.N, (r) => short(r.N)], ["D", (r) => r.tokens, (r) => short(r.tokens)],
    ["FLOPs", (r) => r.flops, (r) => power(r.flops)], ["D / N", (r) => r.tokens_per_parameter, (r) => number(+r.tokens_per_parameter.toPrecision(3))],
    ["Train loss", (r) => r.train_loss, (r) => fixed(r.train_loss, 4)], ["Held-out", (r) => r.loss, (r) => fixed(r.loss, 4)],
    ["Bits / byte", (r) => r.bpb, (r) => fixed(r.bpb, 4)], ["Tokens / s", (r) => r.tokens_per_s, (r) => short(r.tokens_per_s)],
    ["MFU", (r) => r.mfu, (r) => percent(r.mfu)], ["Restarts", (r) => r.restarts, (r) => (r.skips ? `${r.restarts} (${r.skips} skips)` : String(r.restarts))],
    ["MLflow", (r) => r.link ?? "", () => ""],
  ];
  let order = [5, 1], limit = PAGE;
  const kept = new Map(); // id → its row of the table

  function made(row) {
    const tick = el("input", { type: "checkbox", ariaLabel: `Compare ${row.name}`, checked: iso.ticked.has(row.id), onchange: () => { tick.checked ? iso.ticked.add(row.id) : iso.ticked.delete(row.id); iso.compared = true; $("sides").value = "runs"; iso.drawCompare(); } });
    const first = el("th", { scope: "row" }, tick, el("span", { className: "dot" }), el("a", { className: "name", href: `#run/${row.id}` }));
    const cells = COLUMNS.slice(1).map(([label]) => { const cell = el("td"); cell.dataset.label = label; return cell; });
    return el("tr", {}, first, ...cells);
  }
  function update(tr, row) {
    const name = tr.firstChild.lastChild;
    say(name, row.name);
    name.title = row.name;
    tr.querySelector(".dot").style.background = colour(row.size);
    COLUMNS.slice(1, -1).forEach(([, key, text], i) => say(tr.children[i + 1], (text ?? key)(row)));
    if (row.link && /^https?:\/\//.test(row.link) && !tr.lastChild.firstChild) put(tr.lastChild, el("a", { href: row.link, rel: "noopener noreferrer", target: "_blank", textContent: "open", ariaLabel: `${row.name} in MLflow` }));
  }

  function heads() {
    const [by, way] = order;
    const cells = COLUMNS.map(([name], i) => {
      const cell = el("th", { scope: "col" }, el("button", { type: "button", textContent: name, onclick: () => { order = [i, i === by ? -way : 1]; heads(); rows(); $("table").querySelectorAll("thead button")[i].focus(); } }));
      if (i === by) cell.ariaSort = way > 0 ? "ascending" : "descending";
      return cell;
    });
    $("table").tHead ? put($("table").tHead, el("tr", {}, ...cells)) : put($("table"), el("thead", {}, el("tr", {}, ...cells)), el("tbody"));
  }
  function rows() {
    const [by, way] = order, key = COLUMNS[by][1], words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), status = $("status").value;
    const shown = [...iso.runs.values()].map((r) => r.row).filter((r) => (!status || r.status === status) && words.every((w) => `${r.name} ${r.size} ${r.arch} ${r.experiment} ${r.status}`.toLowerCase().includes(w)));
    shown.sort((a, b) => { const [x, y] = [key(a), key(b)]; return x === y ? (a.name < b.name ? -1 : 1) : x == null ? 1 : y == null ? -1 : way * (x < y ? -1 : 1); });
    const body = $("table").tBodies[0], some = shown.slice(0, limit).map((row) => {
      if (!kept.has(row.id)) kept.set(row.id, made(row));
      update(kept.get(row.id), row);
      return kept.get(row.id);
    });
    if (some.length !== body.children.length || some.some((tr, i) => tr !== body.children[i])) {
      const held = document.activeElement;
      put(body, ...some);
      if (body.contains(held)) held.focus();
    }
    COLUMNS.forEach((_, i) => { // what is known of no run takes no room
      const cells = [$("table").tHead.rows[0], ...some].map((tr) => tr.children[i]), none = some.every((tr) => ["", "–"].includes(tr.children[i].textContent));
      if (cells.some((cell) => cell.hidden !== none)) for (const cell of cells) cell.hidden = none;
    });
    $("more").hidden = shown.length <= limit;
    say($("count"), shown.length === iso.runs.size && shown.length <= limit ? "" : `${Math.min(limit, shown.length)} of ${shown.length} shown${shown.length < iso.runs.size ? `, ${iso.runs.size} in all` : ""}`);
  }
  for (const id of ["filter", "status"]) $(id).addEventListener("input", () => { limit = PAGE; rows(); });
  $("more").addEventListener("click", () => { limit += 10 * PAGE; rows(); });

  const CHARTS = [
    ["Loss", "loss", { type: "log" }], ["Gradient norm", "grad_norm", { type: "log", tickformat: "~g", nticks: 3 }], ["Learning rate", "lr", { rangemode: "tozero" }], ["Tokens per second", "tokens_per_s", { rangemode: "tozero", exponentformat: "SI" }],
    ["MFU", "mfu", { tickformat: ".0%", rangemode: "tozero" }], ["Memory (GiB)", "memory_bytes", { rangemode: "tozero" }], ["Waiting for data (ms)", "wait_s", { rangemode: "tozero" }],
  ];
  const SCALE = { memory_bytes: 2 ** -30, wait_s: 1000 };
  let open = null; // the id of the run whose page is shown

  async function runPage(id) {
    open = id;
    const page = await iso.ask(`runs/${id}`);
    if (open !== id) return;
    if (!page) { $("run-title").textContent = "This run is not here, or cannot be read now"; return; }
    const { row, steps, evals, events, spikes } = page, fresh = $("run").dataset.id !== id;
    $("run").dataset.id = id;
    say($("run-title"), row.name);
    say($("run-words"), `${row.arch} ${row.size}, ${row.status} at step ${progress(row)}. ${["batch_tokens", "seq", "vocab"].filter((k) => page.about[k]).map((k) => `${k.replace("_", " ")} ${short(+page.about[k])}`).join(", ")}.`);
    put($("run-tiles"), tile("parameters N", short(row.N)), tile("tokens D", short(row.tokens), `${number(+row.tokens_per_parameter.toPrecision(3))} per parameter`), tile("FLOPs", power(row.flops)),
      tile("held-out loss", fixed(row.loss, 4), row.bpb == null ? "" : `${fixed(row.bpb, 4)} bits/byte`), tile("GPU-hours", number(+row.hours.toPrecision(3))), tile(row.eta_s == null ? "restarts" : "to go", row.eta_s == null ? row.restarts : duration(row.eta_s)));
    say($("run-events"), [...events.map((e) => `${e.event} at step ${e.step}`), spikes.length && `${spikes.length} loss spike${spikes.length > 1 ? "s" : ""} above 6σ`].filter(Boolean).slice(0, 30).join(" · "));
    if (fresh) {
      document.querySelectorAll("#run-charts .chart").forEach(forget);
      put($("run-charts"), ...CHARTS.filter(([, key]) => steps[key].some((v) => v != null)).map(([label, key]) => el("div", { className: "card" }, el("h3", { textContent: label }), Object.assign(el("div", { className: "chart", role: "img", ariaLabel: `${label} over the steps` }), { id: `run-${key}` }))));
    }
    const ink = theme("--law"), line = theme("--quiet"), c = colour(row.size);
    const marks = events.map((e) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: e.step, x1: e.step, line: { color: ["resume", "restart"].includes(e.event) ? line : ink, width: 1.2, dash: "dot" } }));
    for (const [label, key, axis] of CHARTS) {
      const node = $(`run-${key}`);
      if (!node) continue;
      const y = steps[key].map((v) => (v == null ? null : v * (SCALE[key] ?? 1))), many = steps.step.length > 200;
      const shown = [{ x: steps.step, y, mode: "lines", line: { color: c, width: key === "loss" ? 1.3 : 1.5 }, opacity: key === "loss" && evals.step.length ? 0.55 : 1, hovertemplate: `step %{x}: %{y:.4~g}<extra></extra>` }];
      if (key === "loss") shown.push({ x: evals.step, y: evals.loss, mode: "lines+markers", line: { color: c, width: 2 }, marker: { size: many ? 5 : 6, color: c }, hovertemplate: "step %{x}: held-out %{y:.4f}<extra></extra>" },
        { x: spikes.map((s) => s.step), y: spikes.map((s) => s.loss), mode: "markers", marker: { symbol: "triangle-down", size: 10, color: ink }, hovertemplate: "spike at step %{x}: %{y:.3f}<extra></extra>" },
        { x: events.map((e) => e.step), y: events.map(() => Math.max(...y.filter((v) => v != null))), text: events.map((e) => plain(e.event)), mode: "markers", marker: { size: 7, symbol: "square", color: events.map((e) => (["resume", "restart"].includes(e.event) ? line : ink)) }, hovertemplate: "%{text} at step %{x}<extra></extra>" });
      const losses = key === "loss" ? iso.lossAxis(iso.padded([...y.slice(Math.floor(y.length * 0.03)), ...evals.loss], 0.05), "") : {};
      plot(node, shown, { key: id, margin: { l: 56, r: 10, t: 6, b: 30 }, xaxis: { range: [0, steps.step.at(-1) * 1.01] }, yaxis: { ...losses, title: undefined, nticks: 5, ...axis }, shapes: marks });
    }
    experts(page.moe, fresh);
    others(page, fresh);
  }

  function experts(moe, fresh) {
    $("moe-card").hidden = !moe;
    if (!moe) return;
    const layers = moe.load[0].length, choice = $("layer");
    if (fresh || choice.options.length !== layers + 1) put(choice, el("option", { value: "", textContent: "all: busiest expert of each" }), ...Array.from({ length: layers }, (_, i) => el("option", { value: i, textContent: i })));
    const draw = () => {
      const all = choice.value === "", many = moe.load[0][all ? 0 : +choice.value].length;
      const z = all ? Array.from({ length: layers }, (_, l) => moe.load.map((at) => Math.max(...at[l]))) : Array.from({ length: many }, (_, e) => moe.load.map((at) => at[+choice.value][e]));
      say($("moe-words"), `Tokens against an even share (1 = even) of ${many} experts${all ? ", the busiest of each layer" : ` in layer ${choice.value}`}.`);
      plot("moe", [{ type: "heatmap", x: moe.step, y: z.map((_, i) => i), z, colorscale: "Viridis", zmin: 0, zmax: Math.max(2, ...z.flat()), colorbar: { thickness: 10, outlinewidth: 0, title: { text: "× even" } }, hovertemplate: `step %{x}, ${all ? "layer" : "expert"} %{y}: %{z:.2f}× even<extra></extra>` }],
        { key: choice.value, xaxis: { title: { text: "step" } }, yaxis: { title: { text: all ? "layer" : "expert" }, autorange: "reversed", dtick: z.length > 12 ? undefined : 1 } });
    };
    choice.oninput = draw;
    draw();
  }

  function others(page, fresh) {
    const choice = $("other"), ids = [...iso.runs.keys()].filter((id) => id !== page.id);
    if (fresh || choice.options.length !== ids.length + 1) {
      const was = choice.value;
      put(choice, el("option", { value: "", textContent: ids.length ? "choose …" : "no other run" }), ...ids.map((id) => el("option", { value: id, textContent: iso.runs.get(id).row.name })));
      choice.value = fresh ? "" : was;
      if (fresh) say($("agreement"), "Every step records a hash of its token ids; two runs that were fed alike agree at every step they share.");
    }
    choice.oninput = async () => {
      const other = choice.value && (await iso.ask(`runs/${choice.value}`));
      if (!other) return;
      const theirs = new Map(other.tokens.step.map((s, i) => [s, other.tokens.hash[i]])), ours = page.tokens;
      const both = ours.step.filter((s) => theirs.has(s)), off = both.filter((s) => theirs.get(s) !== ours.hash[ours.step.indexOf(s)]);
      say($("agreement"), !both.length ? "They share no step whose tokens were recorded."
        : !off.length ? `The same tokens at all ${both.length} steps compared, up to step ${both.at(-1)}.`
          : `Different tokens at ${off.length} of ${both.length} steps compared, first at step ${off[0]}.`);
    };
  }

  iso.runPage = runPage;
  iso.drawRuns = () => { for (const id of kept.keys()) if (!iso.runs.has(id)) kept.delete(id); if (!$("table").tHead) heads(); rows(); };
})();
