// IsoFLOP valleys, the law and how far to trust it, and forecasts from the grid that the server
// computed.
(() => {
  "use strict";
  const {
    $, el, fill, fillSelect, setText, escapeHtml, short, power, fixed, number, duration, typeset, tile,
    table, rankColor, fade, theme, dark, plot, lossAxis, logAxis, band, padded,
  } = iso;
  const GREEK = { alpha: "α", beta: "β", gamma: "γ", alpha_N: "α of N", alpha_D: "α of D" };
  const COMPUTE = "training compute (FLOPs)";
  const MAX_DROPPED = 12;

  // ── IsoFLOP ────────────────────────────────────────────────────────────────────────────────────

  // A budget's interpolated valley, or the straight lines between its runs.
  function valleyLine(budget) {
    if (budget.valley) return budget.valley;
    const points = budget.N.map((N, i) => [N, budget.loss[i]]).sort((p, q) => p[0] - q[0]);
    return { N: points.map((p) => p[0]), loss: points.map((p) => p[1]) };
  }

  function drawValleys(budgets) {
    const order = budgets.map((budget) => budget.budget);
    const traces = [];
    for (const budget of budgets) {
      const color = rankColor(order, budget.budget);
      const line = valleyLine(budget);
      const at = `${power(budget.budget)} FLOPs`;
      traces.push({
        x: line.N,
        y: line.loss,
        mode: "lines",
        line: { color: fade(color, 0.6), width: 1.6 },
        hoverinfo: "skip",
      });
      traces.push({
        x: budget.N,
        y: budget.loss,
        text: budget.run.map(escapeHtml),
        mode: "markers",
        marker: { color, size: 7 },
        hovertemplate: `<b>%{text}</b><br>N %{x:.3s} · loss %{y:.4f}<br>${at}<extra></extra>`,
      });
      if (budget.minimum?.N) traces.push({
        x: [budget.minimum.N],
        y: [budget.minimum.loss],
        mode: "markers",
        marker: { symbol: "star", size: 13, color: theme("--law") },
        hovertemplate: `N* %{x:.3s} at ${at}<br>loss %{y:.4f}<extra></extra>`,
      });
    }
    const losses = budgets.flatMap((budget) => budget.loss);
    plot("valleys", traces, {
      xaxis: logAxis("parameters N"),
      yaxis: lossAxis(padded(losses, 0.06), "loss (nats per token)"),
    });
  }

  // N*(C) and D*(C): the law's lines and the measured minima.
  function drawPath(fit, budgets, withMinimum) {
    const computes = budgets.map((budget) => budget.budget);
    const [from, to] = [Math.min(...computes) / 2, Math.max(...computes) * 10];
    const inRange = fit.grid.C.map((C, i) => ({ C, N: fit.grid.N?.[i], D: fit.grid.D?.[i] }))
      .filter((point) => point.N && point.C >= from && point.C <= to);
    const pair = (key, color) => [
      {
        x: inRange.map((point) => point.C),
        y: inRange.map((point) => point[key]),
        mode: "lines",
        line: { color, width: 2, dash: "dash" },
        text: inRange.map((point) => power(point.C)),
        hovertemplate: `${key}* %{y:.3s} at %{text} FLOPs<extra></extra>`,
      },
      {
        x: withMinimum.map((budget) => budget.budget),
        y: withMinimum.map((budget) => budget.minimum[key]),
        mode: "markers+text",
        text: withMinimum.map((_, i) => (i + 1 === withMinimum.length ? `${key}* ` : "")),
        textposition: "top left",
        textfont: { color },
        marker: { symbol: "star", size: 11, color },
        customdata: withMinimum.map((budget) => power(budget.budget)),
        hovertemplate: `measured ${key}* %{y:.3s} at %{customdata} FLOPs<extra></extra>`,
      },
    ];
    const traces = [
      ...pair("N", dark.matches ? "#56b4e9" : "#0072b2"),
      ...pair("D", dark.matches ? "#e69f00" : "#b25000"),
    ];
    plot("path", traces, { xaxis: logAxis(COMPUTE), yaxis: logAxis("best N and D") });
  }

  function drawMinima(budgets) {
    const heads = [
      "Budget (FLOPs)", "Runs", "N* measured", "D* measured", "Loss there", "N* of the law",
      "D* of the law",
    ];
    const rows = budgets.map(({ budget, run, minimum, law }) => [
      power(budget),
      run.length,
      minimum?.N ? short(minimum.N) : minimum, // a text says why there is no minimum
      short(minimum?.D),
      fixed(minimum?.loss, 4),
      short(law?.N),
      short(law?.D),
    ]);
    table($("minima"), heads, rows);
  }

  function drawIsoflop() {
    const fit = iso.law();
    const budgets = fit.isoflop ?? [];
    const withMinimum = budgets.filter((budget) => budget.minimum?.N);
    $("isoflop-charts").hidden = !budgets.length;
    $("minima").parentElement.hidden = !budgets.length;
    const words = budgets.length
      ? `${withMinimum.length} of ${budgets.length} budgets have a minimum between their sizes.`
      : "No two finished runs have the same budget yet. " +
        "`launch sweep plan configs/scaling/isoflop.toml` plans a grid of them.";
    fill($("isoflop-words"), ...typeset(words));
    if (!budgets.length) return;
    drawValleys(budgets);
    drawPath(fit, budgets, withMinimum);
    drawMinima(budgets);
  }

  // ── the law ────────────────────────────────────────────────────────────────────────────────────

  // The formula with its numbers: L = 1.69 + 482 · N^−0.348 + …
  const formula = (fit) => {
    const p = Object.fromEntries(Object.entries(fit.parameters).map(([name, { value }]) =>
      [name, String(+value.toPrecision(3)).replace("-", "−")]));
    switch (fit.formula) {
      case "L = K·C^−g":
        return `L = ${p.K} · C^−${p.g}`;
      case "L = E + K·C^−g":
        return `L = ${p.E} + ${p.K} · C^−${p.g}`;
      case "L = E + A·N^−α + B·D^−β":
        return `L = ${p.E} + ${p.A} · N^−${p.alpha} + ${p.B} · D^−${p.beta}`;
      default:
        return "";
    }
  };

  const zeroLine = () => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0,
    line: { color: theme("--quiet"), width: 1, dash: "dot" },
  });

  function drawResiduals(used) {
    const sizes = [...new Set(used.N)].sort((a, b) => a - b);
    const trace = {
      x: used.C,
      y: used.residual.map((r) => 100 * r),
      text: used.run.map(escapeHtml),
      mode: "markers",
      marker: { size: 8, color: used.N.map((N) => rankColor(sizes, N)) },
      hovertemplate: "<b>%{text}</b><br>%{y:+.2f}% from the law<extra></extra>",
    };
    plot("residuals", [trace], {
      xaxis: logAxis("FLOPs"),
      yaxis: { title: { text: "% of loss" } },
      shapes: [zeroLine()],
    });
  }

  function drawBacktest(fit) {
    const errors = fit.backtest_errors;
    $("backtest").parentElement.hidden = !errors;
    if (!errors) return;
    const mean = (100 * fit.backtest.mean_absolute_error).toFixed(2);
    setText($("backtest-words"), `Backtest: larger runs predicted from smaller ones, ${mean}% off on average`);
    const trace = {
      x: errors.ratio,
      y: errors.error.map((e) => 100 * e),
      mode: "markers",
      marker: { size: 7, color: fade(iso.viridis(0.4), 0.75) },
      hovertemplate: "%{x:.3g}× beyond: %{y:+.2f}%<extra></extra>",
    };
    plot("backtest", [trace], {
      xaxis: { type: "log", title: { text: "compute beyond the fitted runs (×)" } },
      yaxis: { title: { text: "error, %" } },
      shapes: [zeroLine()],
    });
  }

  function drawProfile(profile) {
    $("profile").parentElement.hidden = !profile;
    if (!profile) return;
    const { low, high } = profile;
    const range = low === high ? `at ${number(high)}` : `between ${number(low)} and ${number(high)}`;
    setText($("profile-words"), `Profile of E: the floor is ${range}`);
    const color = theme("--law");
    const trace = {
      x: profile.E,
      y: profile.objective,
      mode: "lines",
      line: { color, width: 2 },
      hovertemplate: "E %{x:.3f}: objective %{y:.3g}<extra></extra>",
    };
    const interval = {
      type: "rect", yref: "paper", y0: 0, y1: 1, x0: low, x1: high, fillcolor: color, opacity: 0.12,
      line: { width: 0 },
    };
    plot("profile", [trace], {
      xaxis: { title: { text: "E fixed at" } },
      yaxis: logAxis("objective"),
      shapes: [interval],
    });
  }

  function droppedText(dropped) {
    if (!dropped?.length) return "";
    const more = dropped.length - MAX_DROPPED;
    const names = dropped.slice(0, MAX_DROPPED).join("; ");
    return `Not in the law: ${names}${more > 0 ? `; and ${more} more` : ""}.`;
  }

  function drawFit() {
    const fit = iso.law();
    fill($("warnings"), ...(fit.warnings ?? []).map((text) => el("li", {}, ...typeset(text))));
    setText($("plain"), fit.plain ?? "");
    setText($("dropped"), droppedText(fit.points?.dropped));
    $("law-charts").hidden = !fit.law;
    $("parameters").parentElement.hidden = !fit.law;
    if (!fit.law) {
      fill($("formula"));
      return;
    }
    const symbols = el("span", { className: "quiet" }, " ", ...typeset(fit.formula));
    fill($("formula"), ...typeset(formula(fit)), symbols);
    const rows = Object.entries(fit.parameters).map(([name, p]) => [
      GREEK[name] ?? name,
      number(p.value),
      number(p.se),
      p.low == null ? "unknown" : `${number(p.low)} … ${number(p.high)}`,
    ]);
    table($("parameters"), ["Parameter", "Value", "Standard error", "95% interval"], rows);
    drawResiduals(fit.points_used);
    drawBacktest(fit);
    drawProfile(fit.profile);
  }

  // ── forecast ───────────────────────────────────────────────────────────────────────────────────

  let chosenStop = null; // the compute slider stays where it is while the law is refitted

  const cluster = () => iso.head.clusters.find((each) => each.name === $("cluster").value);
  const setPrice = () => { $("price").value = cluster()?.usd_per_gpu_hour ?? ""; };

  function fillClusters() {
    const pairs = iso.head.clusters.map(({ name }) => [name, name]);
    if (fillSelect($("cluster"), pairs, "h100")) setPrice();
  }

  function drawForecast() {
    const fit = iso.law();
    const { grid } = fit;
    $("forecast-body").hidden = !grid;
    let words = "A forecast needs a law, and a law needs two finished runs of different compute.";
    if (grid?.sizes) {
      words = "Choose the compute and how to split it between parameters and tokens. " +
        "`launch forecast` computes the same values.";
    } else if (grid) {
      words = "This law depends on compute alone. To learn how to split it, train runs with other " +
        "ratios of tokens to parameters.";
    }
    fill($("forecast-words"), ...typeset(words));
    if (!grid) return;
    fillClusters();
    $("compute").max = grid.C.length - 1;
    if (chosenStop === null) {
      const start = Math.max(...fit.points_used.C) * 10;
      chosenStop = Math.max(0, grid.C.findIndex((C) => C >= start));
      $("compute").value = chosenStop;
      if (grid.sizes) {
        $("split").max = grid.sizes.length - 1;
        $("split").value = grid.sizes.findIndex((size) => size >= 1);
      }
    }
    $("split-label").hidden = !grid.sizes;
    drawStop();
  }

  // What the sliders point at: compute C, N and D, and the index of the loss in the grid.
  function currentStop(grid) {
    const i = +$("compute").value;
    const C = grid.C[i];
    if (!grid.sizes) return { i, C, share: 1, N: null, D: null, index: i };
    const j = +$("split").value;
    const share = grid.sizes[j]; // of N*
    const N = grid.N[i] * share;
    const index = i * grid.sizes.length + j;
    return { i, C, share, N, D: grid.tokens[index], index };
  }

  // As decide.planned_mfu: of the size nearest to N, unless it is more than 4 times off.
  function plannedMfu(table, N, chosen, gpus) {
    const rows = table?.[chosen.name];
    if (!rows || !N) return null;
    const off = table.N.map((size) => Math.abs(Math.log(size / N)));
    const nearest = off.indexOf(Math.min(...off));
    return off[nearest] > Math.log(4) ? null : rows[table.gpus.indexOf(gpus)][nearest];
  }

  function cost(usd) {
    if (usd < 0.01) return "< $0.01";
    return usd < 1000 ? `$${usd.toFixed(2)}` : `$${short(usd)}`;
  }

  function drawForecastTiles(fit, stop, chosen, gpus) {
    const { grid } = fit;
    const { i, C, share, N, D, index } = stop;
    const best = share === 1;
    const planned = plannedMfu(grid.mfu, N, chosen, gpus);
    const mfu = planned ?? chosen.mfu;
    const hours = C / (chosen.peak_flops * mfu) / 3600;
    const price = +$("price").value;
    const interval = grid.high[index] == null
      ? "interval unknown"
      : `${fixed(grid.low[index], 4)} … ${fixed(grid.high[index], 4)}`;
    const tiles = [tile("held-out loss", fixed(grid.loss[index], 4), interval)];
    if (grid.sizes) {
      tiles.push(tile("parameters N", short(N, 4), best ? "N*" : `N* ${short(grid.N[i])}`));
      tiles.push(tile("tokens D", short(D, 4), best ? "D*" : `D* ${short(grid.D[i])}`));
      tiles.push(tile("tokens per parameter", number(D / N)));
    }
    const far = grid.far?.[index] ? "far outside of the fitted runs: train runs near it first" : "";
    const reach = `${number(C / Math.max(...fit.points_used.C))}×`;
    tiles.push(tile("the compute of the largest run", reach, far));
    const time = `${duration((hours / gpus) * 3600)} on ${gpus}`;
    const shownHours = hours < 0.001 ? "< 0.001" : short(hours);
    const source = planned ? "planned" : "assumed";
    tiles.push(tile(`GPU-hours at ${(100 * mfu).toFixed(1)}% MFU, ${source}`, shownHours, time));
    if (price > 0) tiles.push(tile(`cost at $${price} per GPU-hour`, cost(hours * price)));
    fill($("forecast-tiles"), ...tiles);
  }

  function forecastCommand(fit, stop, chosen, gpus) {
    // The command line cannot distinguish groups with the same options.
    const ambiguous = iso.laws.some((law) => law !== fit && law.options === fit.options);
    const target = stop.share === 1
      ? `--flops ${stop.C.toPrecision(6)}`
      : `--params ${stop.N.toPrecision(6)} --tokens ${stop.D.toPrecision(6)}`;
    const source = ambiguous ? "…" : fit.options;
    return `launch forecast ${source} ${target} --cluster ${chosen.name} --gpus ${gpus}`;
  }

  // Loss against size at the chosen compute, or against compute if the law does not depend on N.
  function drawForecastChart(grid, stop) {
    const color = theme("--law");
    const bySize = Boolean(grid.sizes);
    const xs = bySize ? grid.sizes.map((size) => size * grid.N[stop.i]) : grid.C;
    const first = bySize ? stop.i * grid.sizes.length : 0;
    const part = (list) => list.slice(first, first + xs.length);
    const hasInterval = grid.high[stop.index] != null;
    const interval = hasInterval ? band(xs, part(grid.low), part(grid.high)) : [];
    const line = {
      x: xs,
      y: part(grid.loss),
      mode: "lines",
      line: { color, width: 2 },
      text: xs.map((x) => (bySize ? `N ${short(x)}` : power(x))),
      hovertemplate: "%{text}: %{y:.4f}<extra></extra>",
    };
    const marker = {
      x: [bySize ? stop.N : stop.C],
      y: [grid.loss[stop.index]],
      mode: "markers",
      marker: { size: 13, color, line: { color: theme("--card"), width: 2 } },
      hoverinfo: "skip",
    };
    const bounds = [...part(grid.low), ...part(grid.high)];
    const near = bounds.filter((value) => value < 3 * grid.loss[stop.index]);
    const shown = hasInterval && bySize ? near : part(grid.loss);
    plot("forecast-chart", [...interval, line, marker], {
      key: String(stop.i),
      xaxis: logAxis(bySize ? "parameters N at this compute" : COMPUTE),
      yaxis: lossAxis(padded(shown, 0.04), "loss (nats per token)"),
    });
  }

  function drawStop() {
    const fit = iso.law();
    const stop = currentStop(fit.grid);
    const gpus = +$("gpus").value;
    const chosen = cluster();
    setText($("compute-out"), `${power(stop.C)} FLOPs`);
    $("compute").setAttribute("aria-valuetext", `${stop.C.toExponential(2)} FLOPs`);
    setText($("split-out"), stop.share === 1 ? "N* exactly" : `${number(stop.share)} × N*`);
    $("split").setAttribute("aria-valuetext", $("split-out").textContent);
    drawForecastTiles(fit, stop, chosen, gpus);
    setText($("forecast-command"), forecastCommand(fit, stop, chosen, gpus));
    drawForecastChart(fit.grid, stop);
  }

  $("compute").addEventListener("input", () => {
    chosenStop = $("compute").value;
    drawStop();
  });
  $("cluster").addEventListener("input", setPrice);
  for (const id of ["split", "gpus", "price", "cluster"]) $(id).addEventListener("input", drawStop);
  iso.drawLaw = () => {
    drawIsoflop();
    drawFit();
    drawForecast();
  };
})();
