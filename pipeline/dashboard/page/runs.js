// The table of runs, and the page of one run.
(() => {
  "use strict";
  const {
    $, el, fill, fillSelect, setText, escapeHtml, short, power, fixed, percent, duration, number,
    tile, sizeColor, theme, plot, forget, lossAxis, verticalLine, padded,
  } = iso;

  // ── the table ──────────────────────────────────────────────────────────────────────────────────

  const PAGE_ROWS = innerWidth < 640 ? 20 : 100;
  const progress = (row) =>
    row.steps ? `${short(row.step, 4)} / ${short(row.steps, 4)}` : short(row.step, 4);
  const restarts = (row) =>
    row.skips ? `${row.restarts} (${row.skips} skips)` : String(row.restarts);

  // Label, sort key, and text if it differs from the key.
  const COLUMNS = [
    ["Run", (row) => row.name],
    ["Size", (row) => row.N, (row) => row.size],
    ["Status", (row) => row.status],
    ["Step", (row) => row.step / (row.steps || 1), progress],
    ["ETA", (row) => row.eta_s, (row) => duration(row.eta_s)],
    ["N", (row) => row.N, (row) => short(row.N)],
    ["D", (row) => row.tokens, (row) => short(row.tokens)],
    ["FLOPs", (row) => row.flops, (row) => power(row.flops)],
    ["D / N", (row) => row.tokens_per_parameter, (row) => number(row.tokens_per_parameter, 3)],
    ["Train loss", (row) => row.train_loss, (row) => fixed(row.train_loss, 4)],
    ["Held-out", (row) => row.loss, (row) => fixed(row.loss, 4)],
    ["Bits / byte", (row) => row.bpb, (row) => fixed(row.bpb, 4)],
    ["Tokens / s", (row) => row.tokens_per_s, (row) => short(row.tokens_per_s)],
    ["MFU", (row) => row.mfu, (row) => percent(row.mfu)],
    ["Restarts", (row) => row.restarts, restarts],
    ["MLflow", (row) => row.link ?? "", () => ""],
  ];
  let sortColumn = 5;
  let sortDirection = 1;
  let rowLimit = PAGE_ROWS;
  // Run id → its <tr>. Rows are reused, so that the focus survives an update.
  const tableRows = new Map();

  function newRow(row) {
    const select = () => {
      if (box.checked) iso.selected.add(row.id);
      else iso.selected.delete(row.id);
      iso.sidesChosen = true;
      $("sides").value = "runs";
      iso.drawCompare();
    };
    const box = el("input", {
      type: "checkbox",
      ariaLabel: `Compare ${row.name}`,
      checked: iso.selected.has(row.id),
      onchange: select,
    });
    const name = el("a", { className: "name", href: `#run/${row.id}` });
    const first = el("th", { scope: "row" }, box, el("span", { className: "dot" }), name);
    const cells = COLUMNS.slice(1).map(([label]) => {
      const cell = el("td");
      cell.dataset.label = label;
      return cell;
    });
    return el("tr", {}, first, ...cells);
  }

  function updateRow(tr, row) {
    const name = tr.firstChild.lastChild;
    setText(name, row.name);
    name.title = row.name;
    tr.querySelector(".dot").style.background = sizeColor(row.size);
    COLUMNS.slice(1, -1).forEach(([, key, text], i) => {
      setText(tr.children[i + 1], (text ?? key)(row));
    });
    const cell = tr.lastChild;
    if (/^https?:\/\//.test(row.link ?? "") && !cell.firstChild) {
      fill(cell, el("a", {
        href: row.link,
        rel: "noopener noreferrer",
        target: "_blank",
        textContent: "open",
        ariaLabel: `${row.name} in MLflow`,
      }));
    }
  }

  function sortBy(column) {
    sortDirection = column === sortColumn ? -sortDirection : 1;
    sortColumn = column;
    drawHeads();
    drawRows();
    $("table").querySelectorAll("thead button")[column].focus();
  }

  function drawHeads() {
    const cells = COLUMNS.map(([label], column) => {
      const button = el("button", { type: "button", textContent: label, onclick: () => sortBy(column) });
      const cell = el("th", { scope: "col" }, button);
      if (column === sortColumn) cell.ariaSort = sortDirection > 0 ? "ascending" : "descending";
      return cell;
    });
    const heads = el("tr", {}, ...cells);
    if ($("table").tHead) fill($("table").tHead, heads);
    else fill($("table"), el("thead", {}, heads), el("tbody"));
  }

  // The rows that match the filter, sorted; unknown values come last.
  function matchingRows() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const status = $("status").value;
    const matches = (row) => {
      const text = `${row.name} ${row.size} ${row.arch} ${row.experiment} ${row.status}`.toLowerCase();
      return (!status || row.status === status) && words.every((word) => text.includes(word));
    };
    const key = COLUMNS[sortColumn][1];
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === y) return a.name < b.name ? -1 : 1;
      if (x == null) return 1;
      if (y == null) return -1;
      return sortDirection * (x < y ? -1 : 1);
    };
    return [...iso.runs.values()].map((run) => run.row).filter(matches).sort(compare);
  }

  // A column that is empty for every run is hidden.
  function hideEmptyColumns(shown) {
    COLUMNS.forEach((_, column) => {
      const empty = shown.every((tr) => ["", "–"].includes(tr.children[column].textContent));
      for (const tr of [$("table").tHead.rows[0], ...shown]) {
        if (tr.children[column].hidden !== empty) tr.children[column].hidden = empty;
      }
    });
  }

  function drawRows() {
    const matching = matchingRows();
    const body = $("table").tBodies[0];
    const shown = matching.slice(0, rowLimit).map((row) => {
      if (!tableRows.has(row.id)) tableRows.set(row.id, newRow(row));
      updateRow(tableRows.get(row.id), row);
      return tableRows.get(row.id);
    });
    const same = shown.length === body.children.length &&
      shown.every((tr, i) => tr === body.children[i]);
    if (!same) {
      const focused = document.activeElement;
      fill(body, ...shown);
      if (body.contains(focused)) focused.focus();
    }
    hideEmptyColumns(shown);
    $("more").hidden = matching.length <= rowLimit;
    const all = iso.runs.size;
    const total = matching.length < all ? `, ${all} in total` : "";
    const count = `${shown.length} of ${matching.length} shown${total}`;
    setText($("count"), shown.length === all ? "" : count);
  }

  for (const id of ["filter", "status"]) $(id).addEventListener("input", () => {
    rowLimit = PAGE_ROWS;
    drawRows();
  });
  $("more").addEventListener("click", () => {
    rowLimit += 10 * PAGE_ROWS;
    drawRows();
  });

  iso.drawRuns = () => {
    for (const id of tableRows.keys()) if (!iso.runs.has(id)) tableRows.delete(id);
    if (!$("table").tHead) drawHeads();
    drawRows();
  };

  // ── the page of one run ────────────────────────────────────────────────────────────────────────

  // Title, key of the records, y axis, and factor of the unit.
  const CHARTS = [
    ["Loss", "loss", { type: "log" }, 1],
    ["Gradient norm", "grad_norm", { type: "log", tickformat: "~g", nticks: 3 }, 1],
    ["Learning rate", "lr", { rangemode: "tozero" }, 1],
    ["Tokens per second", "tokens_per_s", { rangemode: "tozero", exponentformat: "SI" }, 1],
    ["MFU", "mfu", { tickformat: ".0%", rangemode: "tozero" }, 1],
    ["Memory (GiB)", "memory_bytes", { rangemode: "tozero" }, 2 ** -30],
    ["Waiting for data (ms)", "wait_s", { rangemode: "tozero" }, 1000],
  ];
  const MAX_EVENTS = 30;
  let openRun = null; // the id of the run whose page is shown

  async function drawRunPage(id) {
    openRun = id;
    const page = await iso.fetch(`runs/${id}`);
    if (openRun !== id) return;
    const isNew = $("run").dataset.id !== id;
    $("run").dataset.id = page ? id : "";
    // Hide the charts of the run that was shown before.
    $("run").classList.toggle("missing", !page);
    if (!page) {
      setText($("run-title"), "This run does not exist, or cannot be read now");
      return;
    }
    drawSummary(page);
    if (isNew) makeCharts(page.steps);
    drawCharts(page);
    drawExperts(page.moe, isNew);
    drawOthers(page, isNew);
  }

  function drawSummary({ row, about, events, spikes }) {
    setText($("run-title"), row.name);
    const facts = ["batch_tokens", "seq", "vocab"].filter((key) => about[key])
      .map((key) => `${key.replace("_", " ")} ${short(about[key])}`);
    const state = `${row.arch} ${row.size}, ${row.status} at step ${progress(row)}.`;
    setText($("run-words"), `${state} ${facts.join(", ")}${facts.length ? "." : ""}`);
    const ratio = `${number(row.tokens_per_parameter, 3)} per parameter`;
    const bits = row.bpb == null ? "" : `${fixed(row.bpb, 4)} bits/byte`;
    fill(
      $("run-tiles"),
      tile("parameters N", short(row.N)),
      tile("tokens D", short(row.tokens), ratio),
      tile("FLOPs", power(row.flops)),
      tile("held-out loss", fixed(row.loss, 4), bits),
      tile("GPU-hours", number(row.hours, 3)),
      row.eta_s == null ? tile("restarts", row.restarts) : tile("time left", duration(row.eta_s)),
    );
    const lines = events.map((event) => `${event.event} at step ${event.step}`);
    if (spikes.length) {
      lines.push(`${spikes.length} loss spike${spikes.length > 1 ? "s" : ""} above 6σ`);
    }
    setText($("run-events"), lines.slice(0, MAX_EVENTS).join(" · "));
  }

  function makeCharts(steps) {
    document.querySelectorAll("#run-charts .chart").forEach(forget);
    const logged = CHARTS.filter(([, key]) => steps[key].some((value) => value != null));
    const cards = logged.map(([title, key]) => {
      const props = { className: "chart", role: "img", ariaLabel: `${title} over the steps` };
      const chart = Object.assign(el("div", props), { id: `run-${key}` });
      return el("div", { className: "card" }, el("h3", { textContent: title }), chart);
    });
    fill($("run-charts"), ...cards);
  }

  const eventColor = (event) =>
    ["resume", "restart"].includes(event.event) ? theme("--quiet") : theme("--law");

  // Held-out losses, spikes and events, on top of the training loss.
  function lossTraces({ row, steps, evals, events, spikes }, losses) {
    const color = sizeColor(row.size);
    const top = Math.max(...losses.filter((value) => value != null));
    return [
      {
        x: evals.step,
        y: evals.loss,
        mode: "lines+markers",
        line: { color, width: 2 },
        marker: { size: steps.step.length > 200 ? 5 : 6, color },
        hovertemplate: "step %{x}: held-out %{y:.4f}<extra></extra>",
      },
      {
        x: spikes.map((spike) => spike.step),
        y: spikes.map((spike) => spike.loss),
        mode: "markers",
        marker: { symbol: "triangle-down", size: 10, color: theme("--law") },
        hovertemplate: "spike at step %{x}: %{y:.3f}<extra></extra>",
      },
      {
        x: events.map((event) => event.step),
        y: events.map(() => top),
        text: events.map((event) => escapeHtml(event.event)),
        mode: "markers",
        marker: { size: 7, symbol: "square", color: events.map(eventColor) },
        hovertemplate: "%{text} at step %{x}<extra></extra>",
      },
    ];
  }

  function drawCharts(page) {
    const { row, steps, evals, events } = page;
    const color = sizeColor(row.size);
    const marks = events.map((event) =>
      verticalLine(event.step, { color: eventColor(event), width: 1.2, dash: "dot" }));
    for (const [, key, axis, factor] of CHARTS) {
      const node = $(`run-${key}`);
      if (!node) continue;
      const isLoss = key === "loss";
      const y = steps[key].map((value) => (value == null ? null : value * factor));
      const traces = [{
        x: steps.step,
        y,
        mode: "lines",
        line: { color, width: isLoss ? 1.3 : 1.5 },
        opacity: isLoss && evals.step.length ? 0.55 : 1,
        hovertemplate: "step %{x}: %{y:.4~g}<extra></extra>",
      }];
      let yaxis = {};
      if (isLoss) {
        traces.push(...lossTraces(page, y));
        // Without the first steps, where the loss falls steeply.
        const learned = [...y.slice(Math.floor(y.length * 0.03)), ...evals.loss];
        yaxis = lossAxis(padded(learned, 0.05), "");
      }
      plot(node, traces, {
        key: row.id,
        margin: { l: 56, r: 10, t: 6, b: 30 },
        xaxis: { range: [0, steps.step.at(-1) * 1.01] },
        yaxis: { ...yaxis, title: undefined, nticks: 5, ...axis },
        shapes: marks,
      });
    }
  }

  // The load of each expert: 1 is an even share of its layer's tokens.
  function drawExperts(moe, isNew) {
    $("moe-card").hidden = !moe;
    if (!moe) return;
    const layers = moe.load[0].length;
    const select = $("layer");
    const numbers = Array.from({ length: layers }, (_, i) => [String(i), String(i)]);
    fillSelect(select, [["", "all (the busiest expert of each)"], ...numbers]);
    if (isNew) select.value = "";
    const draw = () => {
      const all = select.value === "";
      const layer = all ? 0 : +select.value;
      const experts = moe.load[0][layer].length;
      const rows = all
        ? Array.from({ length: layers }, (_, l) => moe.load.map((step) => Math.max(...step[l])))
        : Array.from({ length: experts }, (_, e) => moe.load.map((step) => step[layer][e]));
      const where = all ? ", the busiest of each layer" : ` in layer ${layer}`;
      setText($("moe-words"), `Tokens relative to an even share (1 = even) of ${experts} experts${where}.`);
      const unit = all ? "layer" : "expert";
      const trace = {
        type: "heatmap",
        x: moe.step,
        y: rows.map((_, i) => i),
        z: rows,
        colorscale: "Viridis",
        zmin: 0,
        zmax: Math.max(2, ...rows.flat()),
        colorbar: { thickness: 10, outlinewidth: 0, title: { text: "× even" } },
        hovertemplate: `step %{x}, ${unit} %{y}: %{z:.2f}× even<extra></extra>`,
      };
      const dtick = rows.length > 12 ? undefined : 1;
      plot("moe", [trace], {
        key: select.value,
        xaxis: { title: { text: "step" } },
        yaxis: { title: { text: unit }, autorange: "reversed", dtick },
      });
    };
    select.oninput = draw;
    draw();
  }

  // Whether two runs saw the same tokens, by the hashes at the steps they have in common.
  function agreement(ours, theirs) {
    const other = new Map(theirs.step.map((step, i) => [step, theirs.hash[i]]));
    const common = ours.step.map((step, i) => [step, ours.hash[i]]).filter(([step]) => other.has(step));
    const different = common.filter(([step, hash]) => other.get(step) !== hash);
    if (!common.length) return "The two runs have no step in common whose tokens were recorded.";
    if (!different.length) {
      return `The same tokens at all ${common.length} steps compared, up to step ${common.at(-1)[0]}.`;
    }
    return `Different tokens at ${different.length} of ${common.length} steps compared, ` +
      `first at step ${different[0][0]}.`;
  }

  function drawOthers(page, isNew) {
    const select = $("other");
    const ids = [...iso.runs.keys()].filter((id) => id !== page.id);
    const pairs = ids.map((id) => [id, iso.runs.get(id).row.name]);
    fillSelect(select, [["", ids.length ? "choose …" : "no other run"], ...pairs]);
    if (isNew) {
      select.value = "";
      setText($("agreement"), "Every step records a hash of its token ids. " +
        "Two runs with the same data agree at every step they have in common.");
    }
    select.oninput = async () => {
      const id = select.value;
      const other = id && (await iso.fetch(`runs/${id}`));
      if (other && select.value === id) setText($("agreement"), agreement(page.tokens, other.tokens));
    };
  }

  iso.drawRunPage = drawRunPage;
})();
