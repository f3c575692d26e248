// Figures as people write them, colours, and the way every chart is drawn. Text from runs reaches the page through
// textContent or plain() only.
const iso = { runs: new Map(), laws: [], head: {}, hidden: new Set(), ticked: new Set() };
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const el = (tag, props = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };
  const put = (node, ...children) => (node.replaceChildren(...children), node);
  const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const short = (x, digits = 3) => {
    if (x == null) return "–";
    for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(x) >= 0.9995 * size) return +(x / size).toPrecision(digits) + unit;
    return String(+x.toPrecision(digits));
  };
  const raised = (n) => String(n).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  const power = (x, digits = 2) => {
    if (x == null || !(x > 0)) return "–";
    const [lead, exponent] = x.toExponential(digits).split("e");
    return `${lead}×10${raised(+exponent)}`;
  };
  const fixed = (x, digits) => (x == null ? "–" : x.toFixed(digits));
  const percent = (x, digits = 1) => (x == null ? "–" : `${(100 * x).toFixed(digits)}%`);
  const signed = (x, digits = 2) => (x == null ? "–" : `${x < 0 ? "−" : "+"}${Math.abs(100 * x).toFixed(digits)}%`);
  const duration = (s) => {
    if (s == null) return "–";
    if (s < 1) return "under 1 s";
    if (s < 90) return `${Math.round(s)} s`;
    if (s < 5400) return `${Math.round(s / 60)} min`;
    if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
    return `${(s / 86400).toFixed(1)} days`;
  };
  const number = (x) => (x == null ? "–" : Math.abs(x) >= 1e5 || (x && Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(4)));
  // Exponents are raised, and what stands in `backticks` is code.
  const typeset = (text) => text.split(/(\^−?(?:\d+(?:\.\d+)?|\p{L}+)|`[^`]+`)/u).map((part) => part[0] === "^" ? el("sup", { textContent: part.slice(1) }) : part[0] === "`" ? el("code", { textContent: part.slice(1, -1) }) : part);
  const clock = (s) => new Date(s * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
  const span = (list) => list.reduce(([a, b], v) => (v == null ? [a, b] : [Math.min(a, v), Math.max(b, v)]), [Infinity, -Infinity]);

  const tile = (label, value, more) => el("div", { className: "tile" }, el("dt", { textContent: label }),
    el("dd", {}, ...typeset(String(value))), ...(more ? [el("dd", { className: "quiet", textContent: more })] : []));
  // A table whose first column names its rows; on a phone each row becomes a card with the column's label.
  const table = (node, labels, rows) => put(node,
    el("thead", {}, el("tr", {}, ...labels.map((l) => el("th", { scope: "col", textContent: l })))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((c, i) => {
      const cell = el(i ? "td" : "th", {}, ...(c instanceof Node ? [c] : typeset(String(c))));
      if (i) cell.dataset.label = labels[i]; else cell.scope = "row";
      return cell;
    })))));

  // Viridis: perceptually even, safe for every kind of colour blindness. Each ground uses the part that shows on it.
  const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const viridis = (share) => {
    const [low, high] = dark.matches ? [0.42, 1] : [0.04, 0.76];
    const at = (low + (high - low) * share) * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2);
    const channel = (c, k) => parseInt(c.slice(1 + 2 * k, 3 + 2 * k), 16);
    return `rgb(${[0, 1, 2].map((k) => Math.round(channel(VIRIDIS[i], k) * (1 - at + i) + channel(VIRIDIS[i + 1], k) * (at - i)))})`;
  };
  const ranked = (list, item) => viridis(list.length > 1 ? Math.max(0, list.indexOf(item)) / (list.length - 1) : 0.5);
  const colour = (size) => ranked(iso.sizes, size);
  const OKABE_ITO = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#7f7f7f"];
  const side = (i) => OKABE_ITO[i % OKABE_ITO.length];
  const fade = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `,${alpha})`);
  const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Charts are drawn when Plotly is here and they are in sight; until then the newest wish waits.
  const waiting = new Map(), drawn = new Set();
  let ready = false;
  const sight = new IntersectionObserver((seen) => seen.forEach((s) => { s.target.inSight = s.isIntersecting; paint(s.target); }), { rootMargin: "300px" });
  const paint = (node) => {
    const wish = waiting.get(node);
    if (!ready || !wish || !node.inSight || !node.isConnected) return;
    waiting.delete(node);
    drawn.add(node);
    const [traces, layout] = wish, phone = innerWidth < 640;
    const minor = { ticks: "outside", ticklen: 3, tickcolor: theme("--line"), dtick: "D1" };
    const axis = { gridcolor: theme("--grid"), zeroline: false, linecolor: theme("--line"), exponentformat: "power", automargin: false, fixedrange: phone };
    const whole = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: theme("--font"), color: theme("--quiet"), size: 12 },
      hoverlabel: { bgcolor: theme("--card"), bordercolor: theme("--line"), font: { color: theme("--ink") }, align: "left" },
      margin: { l: phone ? 46 : 60, r: 12, t: 8, b: 44 }, uirevision: layout.key ?? "same", ...layout,
      xaxis: { ...axis, ...(layout.xaxis?.dtick === 1 && { minor }), ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    };
    if (phone && whole.yaxis.title) delete whole.yaxis.title;
    Plotly.react(node, traces, whole, { responsive: true, displayModeBar: false });
  };
  const plot = (id, traces, layout) => {
    const node = typeof id === "string" ? $(id) : id;
    if (!waiting.has(node) && !drawn.has(node)) sight.observe(node);
    waiting.set(node, [traces, layout]);
    paint(node);
  };
  const forget = (node) => { sight.unobserve(node); waiting.delete(node); if (drawn.delete(node)) Plotly.purge(node); };
  // Plotly is the last script: the page is told when it has run.
  document.addEventListener("DOMContentLoaded", () => { ready = true; for (const node of [...waiting.keys()]) paint(node); });

  const lossAxis = (range, title) => ({ type: "log", title: { text: title }, range, nticks: 9 });
  const padded = (values, share) => {
    const [a, b] = span(values).map(Math.log10), pad = (b - a || 0.2) * share;
    return Number.isFinite(a) ? [a - pad, b + pad] : undefined;
  };

  Object.assign(iso, { $, el, put, say, plain, short, power, fixed, percent, signed, duration, number, typeset, clock, span, tile, table,
    dark, viridis, ranked, colour, side, fade, theme, plot, forget, lossAxis, padded });
})();
