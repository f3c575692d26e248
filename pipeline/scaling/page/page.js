// Draws the page from the JSON in #data. Text from runs reaches the page through textContent or plotlyText only.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const el = (tag, props = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };
  const plotlyText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // Figures as people write them: 1.23M, 4.56e13.
  const short = (x, digits = 3) => {
    if (x == null) return "–";
    for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(x) >= size) return +(x / size).toPrecision(digits) + unit;
    return String(+x.toPrecision(digits));
  };
  const superscript = (n) => String(n).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  const power = (x) => {
    if (x == null || !(x > 0)) return "–";
    let exponent = Math.floor(Math.log10(x)), lead = (x / 10 ** exponent).toFixed(2);
    if (lead === "10.00") [lead, exponent] = ["1.00", exponent + 1];
    return `${lead}×10${superscript(exponent)}`;
  };
  const typeset = (text) => text.split(/(\^−?(?:\d+(?:\.\d+)?|\p{L}+))/u).map((part) => part[0] === "^" ? el("sup", { textContent: part.slice(1) }) : part);
  const fixed = (x, digits) => (x == null ? "–" : x.toFixed(digits));

  // Viridis: perceptually even, safe for every kind of colour blindness. Each ground uses the part that shows on it.
  const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const sizes = [...new Map(data.runs.map((r) => [r.size, r.N])).entries()].sort((a, b) => a[1] - b[1]).map(([s]) => s);
  const viridis = (t) => {
    const at = t * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2);
    const channel = (c, k) => parseInt(c.slice(1 + 2 * k, 3 + 2 * k), 16);
    const mixed = [0, 1, 2].map((k) => Math.round(channel(VIRIDIS[i], k) * (1 - at + i) + channel(VIRIDIS[i + 1], k) * (at - i)));
    return `rgb(${mixed})`;
  };
  const colour = (size) => {
    const [low, high] = dark.matches ? [0.42, 1] : [0.04, 0.76];
    const t = sizes.length > 1 ? sizes.indexOf(size) / (sizes.length - 1) : 0.5;
    return viridis(low + (high - low) * t);
  };
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const fade = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `,${alpha})`);
  const hidden = new Set();

  const smoothed = (values, keep) => {
    if (!keep) return values;
    let mean = 0, weight = 0; // exponential, corrected for its start
    return values.map((v) => ((mean = keep * mean + (1 - keep) * v), (weight = keep * weight + 1 - keep), mean / weight));
  };

  function traces(axis, unit, keep) {
    const out = [], bytes = data.runs.find((r) => r.bytes_per_token)?.bytes_per_token;
    const factor = (run) => (unit === "nats" ? 1 : 1 / (Math.LN2 * (run?.bytes_per_token ?? bytes ?? NaN)));
    const fit = data.fit, law = variable("--law");
    if (fit.law && axis === "flops") {
      const k = factor(), scale = (ys) => ys.map((y) => (y == null ? null : y * k));
      const edge = { x: fit.line.C, mode: "lines", line: { width: 0 }, hoverinfo: "skip", name: "interval" };
      if (fit.line.high[0] != null) {
        out.push({ ...edge, y: scale(fit.line.low) });
        out.push({ ...edge, y: scale(fit.line.high), fill: "tonexty", fillcolor: law + (dark.matches ? "26" : "1c") });
      }
      out.push({
        x: fit.line.C, y: scale(fit.line.loss), mode: "lines", name: "law", line: { color: law, width: 2.5, dash: "dash" },
        hovertemplate: "law at %{x:.3s} FLOPs: <b>%{y:.3f}</b><extra></extra>",
      });
    }
    if (axis === "flops") for (const f of data.forecasts) {
      const k = factor(), landed = f.measured != null;
      out.push({
        x: [f.C], y: [f.forecast * k], mode: "markers", name: "forecast",
        error_y: { type: "data", symmetric: false, array: [(f.high - f.forecast) * k], arrayminus: [(f.forecast - f.low) * k], color: law, thickness: 1.5 },
        marker: { symbol: landed ? "diamond" : "diamond-open", size: 12, color: law, line: { width: 2, color: law } },
        hovertemplate: `<b>forecast</b> N ${short(f.N)} on ${short(f.D)} tokens<br>%{y:.3f}` +
          `${landed ? `, measured ${(f.measured * k).toFixed(3)}` : ", not run yet"}<extra></extra>`,
      });
    }
    for (const run of data.runs) {
      if (hidden.has(run.size)) continue;
      const k = factor(run), c = colour(run.size), scale = (ys) => ys.map((y) => y * k);
      const label = `<b>${plotlyText(run.name)}</b><br>N ${short(run.N)} · loss %{y:.3f}<br>%{x:.3s} ` +
        `${axis === "step" ? "steps" : axis === "flops" ? "FLOPs" : axis}<extra></extra>`;
      out.push({
        x: run.train[axis], y: scale(smoothed(run.train.loss, keep)), mode: "lines", name: "train",
        line: { color: fade(c, 0.42), width: 1.4 }, hoverinfo: "skip",
      });
      out.push({
        x: run.held_out[axis], y: scale(run.held_out.loss), mode: "lines+markers", name: "held-out",
        line: { color: c, width: 2 }, marker: { size: 5, color: c }, hovertemplate: label,
      });
      const done = run.status === "finished" && run.held_out.loss.length;
      if (done) {
        const tokens = `${short(run.tokens)} tokens, ${fixed(run.tokens_per_parameter, 1)} per parameter`;
        out.push({
          x: run.held_out[axis].slice(-1), y: scale(run.held_out.loss.slice(-1)), mode: "markers", name: "final",
          marker: { size: 13, color: c, line: { color: variable("--card"), width: 2 } },
          hovertemplate: label.replace("<extra>", `<br>${tokens}<extra>`),
        });
      }
    }
    return out;
  }

  // The frame holds what was learned, not the first steps' fall from ln(vocabulary), and not the band's far end.
  function frame(shown) {
    const xs = [], ys = [];
    for (const t of shown) {
      if (t.name === "final" || t.name === "forecast") { xs.push(...t.x); ys.push(...t.y); }
      if (t.name === "held-out") {
        const last = t.x[t.x.length - 1];
        t.x.forEach((x, i) => { if (x >= last * 0.04 && x > 0) { xs.push(x); ys.push(t.y[i]); } });
      }
      if (t.name === "train" && t.x.length) {
        const last = t.x[t.x.length - 1];
        t.x.forEach((x, i) => { if (x >= last * 0.04 && x > 0) { xs.push(x); ys.push(t.y[i]); } });
      }
      if (t.name === "law") { const end = t.y.length - 1; xs.push(t.x[end]); ys.push(t.y[end]); }
    }
    if (!xs.length) return {};
    const span = (v, pad) => { const [a, b] = [Math.min(...v), Math.max(...v)].map(Math.log10); const p = (b - a || 1) * pad; return [a - p, b + p]; };
    return { x: span(xs, 0.03), y: span(ys, 0.06) };
  }

  function ticks([low, high]) { // round losses at even steps: log axes label decades, and a loss spans less than one
    const a = 10 ** low, b = 10 ** high;
    const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5].find((s) => (b - a) / s <= 8) ?? 10;
    const values = [];
    for (let v = Math.ceil(a / step) * step; v <= b; v += step) values.push(+v.toFixed(4));
    return { tickmode: "array", tickvals: values, ticktext: values.map((v) => v.toFixed(step < 0.1 ? 2 : 1)) };
  }

  function draw() {
    const [axis, unit, keep] = [$("axis").value, $("unit").value, +$("smooth").value];
    const shown = traces(axis, unit, keep), range = frame(shown), phone = innerWidth < 620;
    const titles = { flops: "training compute (FLOPs)", tokens: "tokens", step: "steps" };
    const axisStyle = { type: "log", gridcolor: variable("--grid"), zeroline: false, linecolor: variable("--line"), exponentformat: "power" };
    Plotly.react($("chart"), shown, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: variable("--font"), color: variable("--quiet"), size: 12 },
      hoverlabel: { bgcolor: variable("--card"), bordercolor: variable("--line"), font: { color: variable("--ink") }, align: "left" },
      margin: { l: phone ? 46 : 62, r: 14, t: 10, b: 50 },
      xaxis: { ...axisStyle, title: { text: titles[axis] }, range: range.x, dtick: 1 },
      yaxis: { ...axisStyle, title: phone ? undefined : { text: unit === "nats" ? "loss (nats per token)" : "bits per byte" },
        range: range.y, ...(range.y && range.y[1] - range.y[0] < 1.2 ? ticks(range.y) : {}) },
    }, { responsive: true, displaylogo: false, displayModeBar: phone ? false : "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  }

  function legend() {
    const chip = (text, swatch, size) => {
      const button = el("button", { type: "button" }, Object.assign(el("i"), { style: `background:${swatch}` }), text);
      if (size != null) {
        button.setAttribute("aria-pressed", String(!hidden.has(size)));
        button.onclick = () => { hidden.has(size) ? hidden.delete(size) : hidden.add(size); legend(); draw(); };
      } else button.disabled = true;
      return button;
    };
    const law = data.fit.law ? [chip("law and 95% interval", variable("--law"))] : [];
    const told = data.forecasts.length ? [chip("◇ registered forecast", "transparent")] : [];
    $("legend").replaceChildren(...sizes.map((s) => chip(s, colour(s), s)), ...law, ...told);
  }

  function tiles() {
    const done = data.runs.filter((r) => r.status === "finished"), losses = done.map((r) => r.loss).filter((x) => x != null);
    const total = data.runs.reduce((sum, r) => sum + (r.flops || 0), 0);
    const best = done.find((r) => r.loss === Math.min(...losses));
    const exponent = data.fit.exponents ? ["N* grows as", `C^${data.fit.exponents.a.toFixed(2)}`]
      : data.fit.law ? ["loss falls as", `C^−${data.fit.parameters.g.value.toFixed(3)}`] : ["law", "–"];
    const shown = [
      [`of ${data.runs.length} runs finished`, String(done.length)],
      [best ? `best held-out loss (${best.size})` : "best held-out loss", losses.length ? Math.min(...losses).toFixed(3) : "–"],
      ["bits per byte there", fixed(best?.bpb, 3)],
      ["FLOPs in all", power(total)],
      exponent,
    ];
    $("tiles").replaceChildren(...shown.map(([label, value]) => el("div", { className: "tile" }, el("b", {}, ...typeset(value)), el("span", { className: "quiet", textContent: label }))));
  }

  const GREEK = { alpha: "α", beta: "β", gamma: "γ" };
  const number = (x) => (x == null ? "–" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(4)));
  // The law with its figures in place: L = 1.69 + 482·N^−0.348 + … where the formula is one of sums of powers.
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
    const fit = data.fit;
    $("warnings").replaceChildren(...fit.warnings.map((w) => el("li", {}, ...typeset(w))));
    if (!fit.law) return;
    $("formula").replaceChildren(...typeset(numbers(fit)), el("span", { className: "quiet" }, " ", ...typeset(fit.formula)));
    $("plain").textContent = fit.plain;
    const row = (tag, cells) => el("tr", {}, ...cells.map((c) => el(tag, { textContent: c })));
    $("parameters").replaceChildren(
      el("thead", {}, row("th", ["", "value", "standard error", "95% interval"])),
      el("tbody", {}, ...Object.entries(fit.parameters).map(([name, p]) => row("td", [GREEK[name] ?? name, number(p.value), number(p.se),
        p.low == null ? "not known" : `${number(p.low)} … ${number(p.high)}`]))));
    if (fit.points.dropped.length) $("dropped").textContent = `Not in the law: ${fit.points.dropped.join("; ")}.`;
  }

  const COLUMNS = [
    ["Run", (r) => r.name, (r) => r.name], ["Size", (r) => r.N, (r) => r.size], ["N", (r) => r.N, (r) => short(r.N)],
    ["D (tokens)", (r) => r.tokens, (r) => short(r.tokens)], ["FLOPs", (r) => r.flops, (r) => power(r.flops)],
    ["D / N", (r) => r.tokens_per_parameter, (r) => fixed(r.tokens_per_parameter, 1)], ["Held-out loss", (r) => r.loss, (r) => fixed(r.loss, 4)],
    ["Bits / byte", (r) => r.bpb, (r) => fixed(r.bpb, 4)], ["Tokens / s", (r) => r.tokens_per_s, (r) => short(r.tokens_per_s)],
    ["Status", (r) => r.status, (r) => (r.status === "finished" || !r.steps ? r.status : `${r.status} ${r.step}/${r.steps}`)],
  ];
  let order = [2, 1];
  function table() {
    const [by, way] = order, key = COLUMNS[by][1];
    const rows = [...data.runs].sort((a, b) => { const [x, y] = [key(a), key(b)]; return way * (x === y ? 0 : x == null ? 1 : y == null ? -1 : x < y ? -1 : 1); });
    const head = COLUMNS.map(([name], i) => {
      const cell = el("th", { scope: "col" }, el("button", { type: "button", textContent: name, onclick: () => { order = [i, i === by ? -way : 1]; table(); } }));
      if (i === by) cell.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      return cell;
    });
    const body = rows.map((r) => el("tr", {}, ...COLUMNS.map(([, , text], i) => i ? el("td", { textContent: text(r) })
      : el("td", {}, Object.assign(el("span", { className: "dot" }), { style: `background:${colour(r.size)}` }), el("span", { className: "name", textContent: r.name, title: r.name })))));
    $("runs").replaceChildren(el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
  }

  document.title = `${data.title} · Isoflop`;
  $("title").textContent = data.title;
  $("when").textContent = new Date(data.time * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
  $("convention").textContent = data.convention && `How N and FLOPs are counted: ${data.convention}.`;
  const all = () => { tiles(); law(); table(); legend(); draw(); };
  for (const id of ["axis", "unit", "smooth"]) $(id).addEventListener("input", draw);
  dark.addEventListener("change", all);
  all();
})();
