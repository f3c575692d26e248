// Loss against compute: one trace per size, its runs apart by gaps, so that a thousand runs are a dozen traces.
(() => {
  "use strict";
  const { $, el, put, plain, short, fixed, power, tile, colour, fade, theme, dark, plot, lossAxis, padded } = iso;
  const AXES = { flops: ["training compute (FLOPs)", "FLOPs"], tokens: ["tokens", "tokens"], step: ["steps", "steps"], hours: ["GPU-hours", "GPU-hours"] };

  const MOST_CHIPS = 14;

  const smoothed = (values, keep) => {
    if (!keep) return values;
    let mean = 0, weight = 0; // exponential, corrected for its start
    return values.map((v) => (v == null ? v : ((mean = keep * mean + (1 - keep) * v), (weight = keep * weight + 1 - keep), mean / weight)));
  };
  // Nats per token to bits per byte needs the tokenizer's bytes per token.
  const factor = (run) => $("unit").value === "nats" ? 1
    : 1 / (Math.LN2 * ((run ?? [...iso.runs.values()].find((r) => r.row.group === iso.law().group)?.row)?.bytes_per_token ?? NaN));

  // What a hover says of a point, put into words only when it is asked.
  class Told {
    constructor(row, c, axis, i) { Object.assign(this, { row, c, axis, i }); }
    get run() { return plain(this.row.name); }
    get N() { return short(this.row.N); }
    get D() { return short(this.c.tokens[this.i]); }
    get each() { return short(this.c.tokens[this.i] / this.row.N); }
    get at() { const v = this.c[this.axis][this.i]; return `${this.axis === "flops" ? power(v) : short(v)} ${AXES[this.axis][1]}`; }
  }
  function joined(members, kind, axis, keep) {
    const x = [], y = [], customdata = [];
    for (const { row, curves } of members) {
      const c = curves[kind], k = factor(row);
      smoothed(c.loss, keep).forEach((loss, i) => {
        x.push(c[axis][i] > 0 ? c[axis][i] : null); y.push(loss == null ? null : loss * k); customdata.push(new Told(row, c, axis, i));
      });
      x.push(null); y.push(null); customdata.push(null);
    }
    return { x, y, customdata };
  }

  // The best that any run has reached by then.
  function frontier(members, axis) {
    const all = members.flatMap(({ row, curves: { held_out: c } }) => c.loss.map((loss, i) => [c[axis][i], loss * factor(row)])).filter(([a, b]) => a > 0 && b);
    all.sort((a, b) => a[0] - b[0]);
    let least = Infinity;
    return all.filter(([, loss]) => loss < least && ((least = loss), true));
  }

  function traces(axis, keep) {
    const out = [], law = theme("--law"), fit = iso.law(), members = [...iso.runs.values()].filter((r) => !iso.hidden.has(r.row.size));
    const hover = (what) => `<b>%{customdata.run}</b><br>N %{customdata.N}<br>${what} <b>%{y:.4f}</b><br>D %{customdata.D} · %{customdata.each} tokens per parameter<br>%{customdata.at}<extra></extra>`;
    if (fit.law && axis === "flops") {
      const k = factor(), scale = (ys) => ys.map((y) => (y == null ? null : y * k)), { line } = fit;
      const edge = { x: line.C, mode: "lines", line: { width: 0 }, hoverinfo: "skip", name: "interval" };
      if (line.high[0] != null) out.push({ ...edge, y: scale(line.low) }, { ...edge, y: scale(line.high), fill: "tonexty", fillcolor: law + (dark.matches ? "26" : "1a") });
      out.push({ x: line.C, y: scale(line.loss), mode: "lines", name: "law", text: line.C.map((C) => power(C)), line: { color: law, width: 2.5, dash: "dash" }, hovertemplate: "law at %{text} FLOPs: <b>%{y:.4f}</b><extra></extra>" });
    }
    const crowd = iso.runs.size > 60; // its curves are thinned so far that smoothing would only drag them
    for (const size of iso.sizes) {
      const some = members.filter((r) => r.row.size === size), c = colour(size);
      if (!some.length) continue;
      const rough = iso.runs.size > 300 ? some.filter((r) => r.curves.held_out.loss.length < 2) : some; // of a throng, one curve each
      out.push({ ...joined(rough, "train", axis, crowd ? keep ** 8 : keep), mode: "lines", name: "train", connectgaps: false, line: { color: fade(c, crowd ? 0.2 : 0.4), width: crowd ? 1 : 1.3 }, hovertemplate: hover("training loss") });
      out.push({ ...joined(some, "held_out", axis, 0), mode: crowd ? "lines" : "lines+markers", name: "held-out", connectgaps: false, line: { color: c, width: crowd ? 1.4 : 2 }, marker: { size: 5, color: c }, hovertemplate: hover("held-out loss") });
    }
    const best = frontier(members, axis);
    if (best.length > 1) out.push({ x: best.map((p) => p[0]), y: best.map((p) => p[1]), mode: "lines", name: "frontier", line: { color: theme("--ink"), width: 1.2, dash: "dot" }, hoverinfo: "skip" });
    for (const size of iso.sizes) {
      const done = members.filter((r) => r.row.size === size && r.row.status === "finished" && r.curves.held_out.loss.length);
      const last = done.map(({ row, curves }) => ({ row, curves: { held_out: Object.fromEntries(Object.entries(curves.held_out).map(([key, v]) => [key, v.slice(-1)])) } }));
      if (last.length) out.push({ ...joined(last, "held_out", axis, 0), mode: "markers", name: "final", marker: { size: crowd ? 7 : 12, color: colour(size), line: { color: theme("--card"), width: 1.5 } }, hovertemplate: hover("final held-out loss") });
    }
    if (["flops", "tokens"].includes(axis)) for (const f of fit.forecasts ?? []) {
      const k = factor(), landed = f.measured != null;
      out.push({
        x: [axis === "flops" ? f.C : f.D], y: [f.forecast * k], mode: "markers", name: "forecast",
        error_y: { type: "data", symmetric: false, array: [(f.high - f.forecast) * k], arrayminus: [(f.forecast - f.low) * k], color: law, thickness: 1.5 },
        marker: { symbol: landed ? "diamond" : "diamond-open", size: 12, color: law, line: { width: 2, color: law } },
        hovertemplate: `<b>forecast</b> N ${short(f.N)} on ${short(f.D)} tokens<br>%{y:.4f}${landed ? `, measured ${(f.measured * k).toFixed(4)}` : ", not run yet"}<extra></extra>`,
      });
    }
    return out;
  }

  // The frame holds what was learned, not the first steps' fall from ln(vocabulary), and not the band's far end.
  function frame(shown) {
    const xs = [], ys = [];
    for (const t of shown) {
      if (t.name === "law") { xs.push(t.x.at(-1)); ys.push(t.y.at(-1)); }
      const from = { train: 0.1, "held-out": 0.04, final: 0, forecast: 0 }[t.name]; // of each run's end
      let end = 0;
      for (let i = from == null ? -1 : t.x.length - 1; i >= 0; i--) {
        if (t.x[i + 1] == null) end = t.x[i];
        if (t.x[i] >= end * from && t.y[i] != null && t.x[i] > 0) { xs.push(t.x[i]); ys.push(t.y[i]); }
      }
    }
    return { x: padded(xs, 0.03), y: padded(ys, 0.06) };
  }

  function draw() {
    const axis = $("axis").value, shown = traces(axis, +$("smooth").value), range = frame(shown);
    plot("chart", shown, {
      key: axis + $("unit").value,
      xaxis: { type: "log", title: { text: AXES[axis][0] }, range: range.x, dtick: 1 },
      yaxis: lossAxis(range.y, $("unit").value === "nats" ? "loss (nats per token)" : "bits per byte"),
    });
  }

  function legend() {
    const swatch = (c) => Object.assign(el("i"), { style: `background:${c}` });
    const many = iso.sizes.length > MOST_CHIPS;
    const ramp = many ? [el("span", {}, iso.sizes[0], Object.assign(swatch(`linear-gradient(90deg,${[0, 0.25, 0.5, 0.75, 1].map(iso.viridis)})`), { className: "ramp" }), `${iso.sizes.at(-1)} (${iso.sizes.length} sizes)`)] : [];
    const chips = many ? [] : iso.sizes.map((size) => {
      const chip = el("button", { type: "button", onclick: () => { iso.hidden.has(size) ? iso.hidden.delete(size) : iso.hidden.add(size); legend(); draw(); } }, swatch(colour(size)), size);
      chip.setAttribute("aria-pressed", String(!iso.hidden.has(size)));
      return chip;
    });
    const told = [iso.runs.size > 1 && ["frontier", theme("--ink")], iso.law().law && ["law and 95% interval", theme("--law")]].filter(Boolean).map(([t, c]) => el("span", {}, swatch(c), t));
    if (iso.law().forecasts?.length) told.push(el("span", {}, "◇ registered forecast, ◆ landed"));
    const held = document.activeElement?.closest?.("#legend button")?.textContent;
    put($("legend"), ...ramp, ...chips, ...told);
    chips.find((c) => c.textContent === held)?.focus();
  }

  function tiles() {
    const rows = [...iso.runs.values()].map((r) => r.row), done = rows.filter((r) => r.status === "finished"), fit = iso.law();
    const best = done.filter((r) => r.loss != null).sort((a, b) => a.loss - b.loss)[0], going = rows.filter((r) => r.status === "running").length;
    put($("tiles"),
      tile(`of ${rows.length} runs finished`, done.length, going ? `${going} running` : ""),
      tile(best ? `best held-out loss (${best.size})` : "best held-out loss", fixed(best?.loss, 3)),
      tile("bits per byte there", fixed(best?.bpb, 3)),
      tile("FLOPs in all", power(rows.reduce((sum, r) => sum + (r.flops || 0), 0))),
      fit.exponents ? tile("N* grows as", `C^${fit.exponents.a.toFixed(2)}`) : fit.law && fit.parameters.g ? tile("loss falls as", `C^−${fit.parameters.g.value.toFixed(3)}`) : tile("law", "–"));
  }
  for (const id of ["axis", "unit", "smooth"]) $(id).addEventListener("input", draw);
  iso.drawLoss = () => { tiles(); legend(); draw(); };
})();
