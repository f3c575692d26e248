// Loss against compute. One trace holds all runs of a size, separated by gaps, so that a thousand
// runs are only a dozen traces.
(() => {
  "use strict";
  const {
    $, el, fill, escapeHtml, short, power, fixed, tile, sizeColor, fade, theme, plot, lossAxis,
    logAxis, band, padded,
  } = iso;
  const AXES = {
    flops: { title: "training compute (FLOPs)", unit: "FLOPs" },
    tokens: { title: "tokens", unit: "tokens" },
    step: { title: "steps", unit: "steps" },
    hours: { title: "GPU-hours", unit: "GPU-hours" },
  };
  const MAX_CHIPS = 14; // more sizes than this are shown as a color scale
  const CROWD = 60; // runs; their curves are thinned so far that smoothing would shift them
  const THRONG = 300; // runs; draw the training curve only where there is no held-out curve

  // Exponential moving average, corrected for its start.
  const smoothed = (values, keep) => {
    if (!keep) return values;
    let mean = 0;
    let weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return mean / weight;
    });
  };

  // From nats per token to the chosen unit. Bits per byte need the tokenizer's bytes per token.
  const unitFactor = (row) => {
    if ($("unit").value === "nats") return 1;
    const first = [...iso.runs.values()].find((run) => run.row.group === iso.law().group);
    const bytes = (row ?? first?.row)?.bytes_per_token ?? NaN;
    return 1 / (Math.LN2 * bytes);
  };

  // The text of a point's hover label, computed only when it is shown.
  class Point {
    constructor(row, curve, axis, i) { Object.assign(this, { row, curve, axis, i }); }
    get run() { return escapeHtml(this.row.name); }
    get N() { return short(this.row.N); }
    get D() { return short(this.curve.tokens[this.i]); }
    get ratio() { return short(this.curve.tokens[this.i] / this.row.N); }
    get at() {
      const value = this.curve[this.axis][this.i];
      return `${this.axis === "flops" ? power(value) : short(value)} ${AXES[this.axis].unit}`;
    }
  }

  const hover = (what) =>
    "<b>%{customdata.run}</b><br>N %{customdata.N}<br>" +
    `${what} <b>%{y:.4f}</b><br>` +
    "D %{customdata.D} · %{customdata.ratio} tokens per parameter<br>" +
    "%{customdata.at}<extra></extra>";

  // The curves of several runs as one trace.
  function joined(members, kind, axis, keep) {
    const x = [];
    const y = [];
    const customdata = [];
    for (const { row, curves } of members) {
      const curve = curves[kind];
      const factor = unitFactor(row);
      smoothed(curve.loss, keep).forEach((loss, i) => {
        x.push(curve[axis][i] > 0 ? curve[axis][i] : null);
        y.push(loss == null ? null : loss * factor);
        customdata.push(new Point(row, curve, axis, i));
      });
      x.push(null);
      y.push(null);
      customdata.push(null);
    }
    return { x, y, customdata };
  }

  // The law for each compute, with its interval.
  function lawTraces(fit) {
    const { line } = fit;
    if (!line) return [];
    const factor = unitFactor();
    const scale = (values) => values.map((value) => (value == null ? null : value * factor));
    const law = {
      x: line.C,
      y: scale(line.loss),
      mode: "lines",
      name: "law",
      text: line.C.map((C) => power(C)),
      line: { color: theme("--law"), width: 2.5, dash: "dash" },
      hovertemplate: `${lawWords(fit)} at %{text} FLOPs: <b>%{y:.4f}</b><extra></extra>`,
    };
    const hasInterval = line.high[0] != null;
    return [...(hasInterval ? band(line.C, scale(line.low), scale(line.high)) : []), law];
  }

  function lawWords(fit) {
    const ratio = fit.line.tokens_per_param;
    if (ratio != null) return `law at ${short(ratio)} tokens per parameter`;
    return fit.size_lines.length ? "law at the best N and D" : "law";
  }

  // The law of each size over its tokens, in the color of the size.
  function sizeLawTraces(fit, axis) {
    const factor = unitFactor();
    return fit.size_lines.filter((line) => !iso.hidden.has(line.size)).map((line) => ({
      x: line[axis],
      y: line.loss.map((loss) => loss * factor),
      mode: "lines",
      name: "law of a size",
      line: { color: fade(sizeColor(line.size), 0.8), width: 1.3, dash: "dash" },
      customdata: line.tokens.map((D) => short(D)),
      hovertemplate:
        `law of N ${short(line.N)} on %{customdata} tokens: <b>%{y:.4f}</b><extra></extra>`,
    }));
  }

  function runTraces(members, axis, keep) {
    const crowd = iso.runs.size > CROWD;
    const traces = [];
    for (const size of iso.sizes) {
      const runs = members.filter((run) => run.row.size === size);
      if (!runs.length) continue;
      const color = sizeColor(size);
      const unevaluated = runs.filter((run) => run.curves.held_out.loss.length < 2);
      const trained = iso.runs.size > THRONG ? unevaluated : runs;
      traces.push({
        ...joined(trained, "train", axis, crowd ? keep ** 8 : keep),
        mode: "lines",
        name: "train",
        line: { color: fade(color, crowd ? 0.2 : 0.4), width: crowd ? 1 : 1.3 },
        hovertemplate: hover("training loss"),
      });
      traces.push({
        ...joined(runs, "held_out", axis, 0),
        mode: crowd ? "lines" : "lines+markers",
        name: "held-out",
        line: { color, width: crowd ? 1.4 : 2 },
        marker: { size: 5, color },
        hovertemplate: hover("held-out loss"),
      });
    }
    return traces;
  }

  // The best held-out loss of any run up to each point of the axis.
  function frontierTraces(members, axis) {
    const points = members.flatMap(({ row, curves: { held_out } }) =>
      held_out.loss.map((loss, i) => [held_out[axis][i], loss * unitFactor(row)]));
    const sorted = points.filter(([x, loss]) => x > 0 && loss).sort((a, b) => a[0] - b[0]);
    const best = [];
    for (const point of sorted) {
      if (!best.length || point[1] < best.at(-1)[1]) best.push(point);
    }
    if (best.length < 2) return [];
    return [{
      x: best.map((point) => point[0]),
      y: best.map((point) => point[1]),
      mode: "lines",
      name: "frontier",
      line: { color: theme("--ink"), width: 1.2, dash: "dot" },
      hoverinfo: "skip",
    }];
  }

  function finalTraces(members, axis) {
    const size_px = iso.runs.size > CROWD ? 7 : 12;
    const lastOnly = (curve) =>
      Object.fromEntries(Object.entries(curve).map(([key, values]) => [key, values.slice(-1)]));
    return iso.sizes.flatMap((size) => {
      const finished = members.filter((run) =>
        run.row.size === size && run.row.status === "finished" && run.curves.held_out.loss.length);
      if (!finished.length) return [];
      const ends = finished.map(({ row, curves }) =>
        ({ row, curves: { held_out: lastOnly(curves.held_out) } }));
      return [{
        ...joined(ends, "held_out", axis, 0),
        mode: "markers",
        name: "final",
        marker: { size: size_px, color: sizeColor(size), line: { color: theme("--card"), width: 1.5 } },
        hovertemplate: hover("final held-out loss"),
      }];
    });
  }

  // A registered forecast with its interval: open until its run has finished.
  iso.forecastTrace = (f, x, factor) => {
    const color = theme("--law");
    const done = f.measured != null;
    const result = done ? `, measured ${(f.measured * factor).toFixed(4)}` : ", not run yet";
    return {
      x: [x],
      y: [f.forecast * factor],
      mode: "markers",
      name: "forecast",
      error_y: {
        type: "data",
        symmetric: false,
        array: [(f.high - f.forecast) * factor],
        arrayminus: [(f.forecast - f.low) * factor],
        color,
        thickness: 1.5,
      },
      marker: { symbol: done ? "diamond" : "diamond-open", size: 12, color, line: { width: 2, color } },
      hovertemplate:
        `<b>forecast</b> N ${short(f.N)} on ${short(f.D)} tokens<br>%{y:.4f}${result}<extra></extra>`,
    };
  };

  function forecastTraces(fit, axis) {
    const factor = unitFactor();
    return (fit.forecasts ?? []).map((f) =>
      iso.forecastTrace(f, axis === "flops" ? f.C : f.D, factor));
  }

  function allTraces(axis, keep) {
    const fit = iso.law();
    const members = [...iso.runs.values()].filter((run) => !iso.hidden.has(run.row.size));
    return [
      ...(fit.law && axis === "flops" ? lawTraces(fit) : []),
      ...(fit.law && ["flops", "tokens"].includes(axis) ? sizeLawTraces(fit, axis) : []),
      ...runTraces(members, axis, keep),
      ...frontierTraces(members, axis),
      ...(["flops", "tokens"].includes(axis) ? forecastTraces(fit, axis) : []),
      ...finalTraces(members, axis), // last, so that a forecast hides no measured loss
    ];
  }

  // The range of both axes. It leaves out the first steps, in which the loss falls steeply from
  // ln(vocabulary), and the far end of the law's interval.
  function frame(traces) {
    const xs = [];
    const ys = [];
    // A run counts from this share of its length on.
    const FROM = { train: 0.1, "held-out": 0.04, final: 0, forecast: 0 };
    for (const trace of traces) {
      if (trace.name === "law") {
        xs.push(trace.x.at(-1));
        ys.push(trace.y.at(-1));
      }
      const from = FROM[trace.name];
      if (from == null) continue;
      let end = 0; // last x of the run that point i belongs to
      for (let i = trace.x.length - 1; i >= 0; i--) {
        const [x, y] = [trace.x[i], trace.y[i]];
        if (trace.x[i + 1] == null) end = x;
        if (x > 0 && x >= end * from && y != null) {
          xs.push(x);
          ys.push(y);
        }
      }
    }
    return { x: padded(xs, 0.03), y: padded(ys, 0.06) };
  }

  function drawChart() {
    const axis = $("axis").value;
    const unit = $("unit").value;
    const traces = allTraces(axis, +$("smooth").value);
    const range = frame(traces);
    plot("chart", traces, {
      key: axis + unit,
      xaxis: { ...logAxis(AXES[axis].title), range: range.x },
      yaxis: lossAxis(range.y, unit === "nats" ? "loss (nats per token)" : "bits per byte"),
    });
  }

  const swatch = (background) => Object.assign(el("i"), { style: `background:${background}` });

  function chip(size) {
    const toggle = () => {
      if (!iso.hidden.delete(size)) iso.hidden.add(size);
      drawLegend();
      drawChart();
    };
    const button = el("button", { type: "button", onclick: toggle }, swatch(sizeColor(size)), size);
    button.setAttribute("aria-pressed", String(!iso.hidden.has(size)));
    return button;
  }

  function drawLegend() {
    const entries = [];
    let chips = [];
    if (iso.sizes.length > MAX_CHIPS) {
      const stops = [0, 0.25, 0.5, 0.75, 1].map(iso.viridis);
      const ramp = Object.assign(swatch(`linear-gradient(90deg,${stops})`), { className: "ramp" });
      const last = `${iso.sizes.at(-1)} (${iso.sizes.length} sizes)`;
      entries.push(el("span", {}, iso.sizes[0], ramp, last));
    } else {
      chips = iso.sizes.map(chip);
      entries.push(...chips);
    }
    const fit = iso.law();
    if (iso.runs.size > 1) entries.push(el("span", {}, swatch(theme("--ink")), "best of the runs"));
    if (fit.line) entries.push(el("span", {}, swatch(theme("--law")), `${lawWords(fit)}, 95% interval`));
    if (fit.size_lines?.length) entries.push(el("span", {}, "– – law of each size"));
    if (fit.forecasts?.length) entries.push(el("span", {}, "◇ registered forecast, ◆ run finished"));
    const focused = document.activeElement?.closest?.("#legend button")?.textContent;
    fill($("legend"), ...entries);
    chips.find((each) => each.textContent === focused)?.focus();
  }

  function lawTile(fit) {
    if (fit.exponents) return tile("N* grows as", `C^${fit.exponents.a.toFixed(2)}`);
    const g = fit.law && fit.parameters.g;
    return g ? tile("loss falls as", `C^−${g.value.toFixed(3)}`) : tile("law", "–");
  }

  function drawTiles() {
    const rows = [...iso.runs.values()].map((run) => run.row);
    const finished = rows.filter((row) => row.status === "finished");
    const running = rows.filter((row) => row.status === "running").length;
    const best = finished.filter((row) => row.loss != null).sort((a, b) => a.loss - b.loss)[0];
    const flops = rows.reduce((sum, row) => sum + (row.flops || 0), 0);
    fill(
      $("tiles"),
      tile(`of ${rows.length} runs finished`, finished.length, running ? `${running} running` : ""),
      tile(best ? `best held-out loss (${best.size})` : "best held-out loss", fixed(best?.loss, 3)),
      tile("bits per byte of that run", fixed(best?.bpb, 3)),
      tile("FLOPs in total", power(flops)),
      lawTile(iso.law()),
    );
  }

  for (const id of ["axis", "unit", "smooth"]) $(id).addEventListener("input", drawChart);
  iso.drawLoss = () => {
    drawTiles();
    drawLegend();
    drawChart();
  };
})();
