// IsoFLOP valleys, the law with its doubts, and forecasts read off the grid that the server computed.
(() => {
  "use strict";
  const { $, el, put, say, plain, short, power, fixed, number, duration, typeset, tile, table, ranked, fade, theme, dark, plot, lossAxis, padded, span } = iso;
  const GREEK = { alpha: "α", beta: "β", gamma: "γ", alpha_N: "α of N", alpha_D: "α of D" };

  function valleys() {
    const fit = iso.law(), budgets = fit.isoflop ?? [], law = theme("--law");
    const deep = budgets.filter((b) => b.minimum?.N);
    $("isoflop-charts").hidden = $("minima").parentElement.hidden = !budgets.length;
    put($("isoflop-words"), ...typeset(!budgets.length
      ? "No two finished runs share a budget yet. `launch sweep plan configs/scaling/isoflop.toml` lays out a grid of them."
      : `${deep.length} of ${budgets.length} budgets show a minimum inside their sizes.`));
    if (!budgets.length) return;
    const order = budgets.map((b) => b.budget), shown = [];
    for (const b of budgets) {
      const c = ranked(order, b.budget);
      const line = b.valley ?? { N: [...b.N].sort((p, q) => p - q), loss: b.loss.map((l, i) => [b.N[i], l]).sort((p, q) => p[0] - q[0]).map((p) => p[1]) };
      shown.push({ x: line.N, y: line.loss, mode: "lines", line: { color: fade(c, 0.6), width: 1.6 }, hoverinfo: "skip" });
      shown.push({ x: b.N, y: b.loss, text: b.run.map(plain), mode: "markers", marker: { color: c, size: 7 }, hovertemplate: `<b>%{text}</b><br>N %{x:.3s} · loss %{y:.4f}<br>${power(b.budget)} FLOPs<extra></extra>` });
      if (b.minimum?.N) shown.push({ x: [b.minimum.N], y: [b.minimum.loss], mode: "markers", marker: { symbol: "star", size: 13, color: law }, hovertemplate: `N* %{x:.3s} at ${power(b.budget)} FLOPs<br>loss %{y:.4f}<extra></extra>` });
    }
    plot("valleys", shown, { xaxis: { type: "log", title: { text: "parameters N" }, dtick: 1 }, yaxis: lossAxis(padded(budgets.flatMap((b) => b.loss), 0.06), "loss (nats per token)") });
    const [inside, from, to] = [fit.grid.N ?? [], Math.min(...order) / 2, Math.max(...order) * 10];
    const at = fit.grid.C.map((C, i) => [C, inside[i], fit.grid.D?.[i]]).filter(([C, N]) => N && C >= from && C <= to);
    const two = [["N*", "N", 1, "#0072b2", "#56b4e9"], ["D*", "D", 2, "#b25000", "#e69f00"]].flatMap(([name, key, column, light, night]) => {
      const c = dark.matches ? night : light;
      return [
        { x: at.map((p) => p[0]), y: at.map((p) => p[column]), mode: "lines", line: { color: c, width: 2, dash: "dash" }, text: at.map((p) => power(p[0])), hovertemplate: `${name} %{y:.3s} at %{text} FLOPs<extra></extra>` },
        { x: deep.map((b) => b.budget), y: deep.map((b) => b.minimum[key]), mode: "markers+text", text: deep.map((b, i) => (i + 1 === deep.length ? `${name} ` : "")), textposition: "top left", textfont: { color: c }, marker: { symbol: "star", size: 11, color: c }, customdata: deep.map((b) => power(b.budget)), hovertemplate: `measured ${name} %{y:.3s} at %{customdata} FLOPs<extra></extra>` },
      ];
    });
    plot("path", two, { xaxis: { type: "log", title: { text: "training compute (FLOPs)" }, dtick: 1 }, yaxis: { type: "log", title: { text: "best N and D" }, dtick: 1 } });
    table($("minima"), ["Budget (FLOPs)", "Runs", "N* measured", "D* measured", "Loss there", "N* of the law", "D* of the law"], budgets.map((b) => {
      const m = b.minimum?.N ? b.minimum : null;
      return [power(b.budget), b.run.length, m ? short(m.N) : b.minimum, m ? short(m.D) : "–", m ? fixed(m.loss, 4) : "–", b.law ? short(b.law.N) : "–", b.law ? short(b.law.D) : "–"];
    }));
  }

  // The law with its figures in place: L = 1.69 + 482·N^−0.348 + … where the formula is a sum of powers.
  const numbers = (fit) => {
    const p = Object.fromEntries(Object.entries(fit.parameters).map(([k, v]) => [k, String(+v.value.toPrecision(3)).replace("-", "−")]));
    switch (fit.formula) {
      case "L = K·C^−g": return `L = ${p.K} · C^−${p.g}`;
      case "L = E + K·C^−g": return `L = ${p.E} + ${p.K} · C^−${p.g}`;
      case "L = E + A·N^−α + B·D^−β": return `L = ${p.E} + ${p.A} · N^−${p.alpha} + ${p.B} · D^−${p.beta}`;
      default: return "";
    }
  };
  function law() {
    const fit = iso.law(), ink = theme("--law"), zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: theme("--quiet"), width: 1, dash: "dot" } };
    put($("warnings"), ...(fit.warnings ?? []).map((w) => el("li", {}, ...typeset(w))));
    put($("formula"), ...(fit.law ? [...typeset(numbers(fit)), el("span", { className: "quiet" }, " ", ...typeset(fit.formula))] : []));
    $("plain").textContent = fit.plain ?? "";
    $("law-charts").hidden = $("parameters").parentElement.hidden = !fit.law;
    $("dropped").textContent = fit.points?.dropped.length ? `Not in the law: ${fit.points.dropped.slice(0, 12).join("; ")}${fit.points.dropped.length > 12 ? `; and ${fit.points.dropped.length - 12} more` : ""}.` : "";
    if (!fit.law) return;
    table($("parameters"), ["Parameter", "Value", "Standard error", "95% interval"], Object.entries(fit.parameters).map(([name, p]) =>
      [GREEK[name] ?? name, number(p.value), number(p.se), p.low == null ? "not known" : `${number(p.low)} … ${number(p.high)}`]));
    const used = fit.points_used, sizes = [...new Set(used.N)].sort((a, b) => a - b);
    plot("residuals", [{ x: used.C, y: used.residual.map((r) => 100 * r), text: used.run.map(plain), mode: "markers", marker: { size: 8, color: used.N.map((n) => ranked(sizes, n)) }, hovertemplate: "<b>%{text}</b><br>%{y:+.2f}% off the law<extra></extra>" }],
      { xaxis: { type: "log", title: { text: "FLOPs" }, dtick: 1 }, yaxis: { title: { text: "% of loss" } }, shapes: [zero] });
    const back = fit.backtest_errors;
    $("backtest").parentElement.hidden = !back;
    if (back) {
      $("backtest-words").textContent = `Backtest: larger runs foretold from smaller ones, ${(100 * fit.backtest.mean_absolute_error).toFixed(2)}% off on average`;
      plot("backtest", [{ x: back.ratio, y: back.error.map((e) => 100 * e), mode: "markers", marker: { size: 7, color: fade(iso.viridis(0.4), 0.75) }, hovertemplate: "%{x:.3g}× beyond: %{y:+.2f}%<extra></extra>" }],
        { xaxis: { type: "log", title: { text: "compute beyond the fitted runs (×)" } }, yaxis: { title: { text: "error, %" } }, shapes: [zero] });
    }
    const of_e = fit.profile;
    $("profile").parentElement.hidden = !of_e;
    if (of_e) {
      $("profile-words").textContent = `Profile of E: the floor lies ${of_e.low === of_e.high ? "at" : `between ${number(of_e.low)} and`} ${number(of_e.high)}`;
      plot("profile", [{ x: of_e.E, y: of_e.objective, mode: "lines", line: { color: ink, width: 2 }, hovertemplate: "E %{x:.3f}: objective %{y:.3g}<extra></extra>" }],
        { xaxis: { title: { text: "E held at" } }, yaxis: { type: "log", title: { text: "objective" }, dtick: 1 }, shapes: [{ type: "rect", yref: "paper", y0: 0, y1: 1, x0: of_e.low, x1: of_e.high, fillcolor: ink, opacity: 0.12, line: { width: 0 } }] });
    }
  }

  let at = null; // the sliders stay where they are while the law is refitted
  function forecast() {
    const fit = iso.law(), grid = fit.grid;
    $("forecast-body").hidden = !grid;
    put($("forecast-words"), ...typeset(!grid ? "A forecast needs a law, and a law two finished runs of different compute."
      : grid.sizes ? "Move compute, and how it is split between size and tokens; every stop was computed by the functions behind `launch forecast`."
        : "This law knows compute alone: runs whose N and D do not grow in step would tell how to split it."));
    if (!grid) return;
    const cluster = $("cluster"), names = iso.head.clusters.map((c) => c.name);
    if ([...cluster.options].map((o) => o.value).join() !== names.join()) {
      put(cluster, ...names.map((n) => el("option", { textContent: n, value: n })));
      cluster.value = names.includes("h100") ? "h100" : names[0];
      price();
    }
    $("compute").max = grid.C.length - 1;
    if (at === null) {
      const largest = Math.max(...fit.points_used.C) * 10;
      $("compute").value = at = Math.max(0, grid.C.findIndex((C) => C >= largest));
      if (grid.sizes) { $("split").max = grid.sizes.length - 1; $("split").value = grid.sizes.findIndex((s) => s >= 1); }
    }
    $("split-label").hidden = !grid.sizes;
    tell();
  }
  const price = () => { $("price").value = iso.head.clusters.find((c) => c.name === $("cluster").value)?.usd_per_gpu_hour ?? ""; };
  function tell() {
    const fit = iso.law(), grid = fit.grid, i = +$("compute").value, C = grid.C[i], width = grid.sizes?.length ?? 1, j = grid.sizes ? +$("split").value : 0;
    const k = i * width + j, share = grid.sizes?.[j] ?? 1, N = grid.N?.[i] * share, D = grid.sizes ? C / grid.each / N : null;
    const chosen = iso.head.clusters.find((c) => c.name === $("cluster").value), gpus = Math.max(1, +$("gpus").value || 1), usd = +$("price").value;
    const hours = chosen ? C / (chosen.peak_flops * chosen.mfu) / 3600 : null, beyond = C / Math.max(...fit.points_used.C);
    say($("compute-out"), `${power(C)} FLOPs`);
    $("compute").setAttribute("aria-valuetext", `${C.toExponential(2)} FLOPs`);
    say($("split-out"), share === 1 ? "N* exactly" : `${number(share)} × N*`);
    $("split").setAttribute("aria-valuetext", $("split-out").textContent);
    const interval = grid.high[k] == null ? "interval not known" : `${fixed(grid.low[k], 4)} … ${fixed(grid.high[k], 4)}`;
    put($("told"), tile("held-out loss", fixed(grid.loss[k], 4), interval),
      ...(grid.sizes ? [tile("parameters N", short(N, 4), share === 1 ? "N*" : `N* ${short(grid.N[i])}`), tile("tokens D", short(D, 4), share === 1 ? "D*" : `D* ${short(grid.D[i])}`), tile("tokens per parameter", number(D / N))] : []),
      tile("beyond the largest run", `${number(beyond)}×`),
      tile(`GPU-hours at ${100 * chosen.mfu}% MFU`, hours < 0.001 ? "< 0.001" : short(hours), `${duration(hours / gpus * 3600)} on ${gpus}`),
      ...(usd > 0 ? [tile(`cost at $${usd} per GPU-hour`, hours * usd < 0.01 ? "< $0.01" : hours * usd < 1000 ? `$${(hours * usd).toFixed(2)}` : `$${short(hours * usd)}`)] : []));
    const what = share === 1 || !grid.sizes ? `--flops ${C.toPrecision(6)}` : `--params ${N.toPrecision(6)} --tokens ${D.toPrecision(6)}`;
    say($("told-command"), `launch forecast ${iso.laws.some((l) => l !== fit && l.options === fit.options) ? "…" : fit.options} ${what} --cluster ${chosen.name} --gpus ${gpus}`);
    const ink = theme("--law"), xs = grid.sizes ? grid.sizes.map((s) => s * grid.N[i]) : grid.C, first = grid.sizes ? i * width : 0;
    const part = (list) => list.slice(first, first + xs.length), edge = { x: xs, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    const band = grid.high[k] == null ? [] : [{ ...edge, y: part(grid.low) }, { ...edge, y: part(grid.high), fill: "tonexty", fillcolor: ink + (dark.matches ? "26" : "1a") }];
    plot("told-chart", [...band, { x: xs, y: part(grid.loss), mode: "lines", line: { color: ink, width: 2 }, text: xs.map((x) => (grid.sizes ? `N ${short(x)}` : power(x))), hovertemplate: "%{text}: %{y:.4f}<extra></extra>" },
      { x: [grid.sizes ? N : C], y: [grid.loss[k]], mode: "markers", marker: { size: 13, color: ink, line: { color: theme("--card"), width: 2 } }, hoverinfo: "skip" }],
    { key: String(i), xaxis: { type: "log", title: { text: grid.sizes ? "parameters N at this compute" : "training compute (FLOPs)" }, dtick: 1 }, yaxis: lossAxis(padded(band.length && grid.sizes ? [...part(grid.low), ...part(grid.high)].filter((v) => v < 3 * grid.loss[k]) : part(grid.loss), 0.04), "loss (nats per token)") });
  }
  $("compute").addEventListener("input", () => { at = $("compute").value; tell(); });
  $("cluster").addEventListener("input", price);
  for (const id of ["split", "gpus", "price", "cluster"]) $(id).addEventListener("input", tell);
  iso.drawLaw = () => { valleys(); law(); forecast(); };
})();
