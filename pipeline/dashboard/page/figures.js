// Shared by all scripts: DOM helpers, numbers as people write them, colors, and drawing of charts.
// Text from runs reaches the page only through textContent or escapeHtml().
const iso = {
  runs: new Map(), // run id → { row, curves }
  laws: [],
  head: {}, // the last answer of api/runs
  sizes: [], // sizes of all runs, smallest first
  hidden: new Set(), // sizes switched off in the legend
  selected: new Set(), // ids of the runs selected for comparison
};
(() => {
  "use strict";

  // ── DOM ────────────────────────────────────────────────────────────────────────────────────────

  const $ = (id) => document.getElementById(id);

  const el = (tag, props = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };

  const fill = (node, ...children) => {
    node.replaceChildren(...children);
    return node;
  };

  // Fill a <select> with [value, label] pairs and choose one; return whether the pairs have changed.
  const fillSelect = (select, pairs, chosen = select.value) => {
    const key = JSON.stringify(pairs);
    if (select.dataset.pairs === key) return false; // do not close an open list
    select.dataset.pairs = key;
    fill(select, ...pairs.map(([value, label]) => el("option", { value, textContent: label })));
    if (pairs.some(([value]) => value === chosen)) select.value = chosen;
    return true;
  };

  // Do not replace an equal text, because a screen reader would read it again.
  const setText = (node, text) => {
    if (node.textContent !== text) node.textContent = text;
  };

  // For Plotly, which reads a subset of HTML in its labels.
  const escapeHtml = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // ── numbers ────────────────────────────────────────────────────────────────────────────────────

  const UNKNOWN = "–";
  const UNITS = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]];

  // 1.3B
  const short = (x, digits = 3) => {
    if (x == null) return UNKNOWN;
    for (const [unit, size] of UNITS)
      if (Math.abs(x) >= 0.9995 * size) return +(x / size).toPrecision(digits) + unit;
    return String(+x.toPrecision(digits));
  };

  const superscript = (n) => String(n).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");

  // 5.21×10¹³
  const power = (x, digits = 2) => {
    if (x == null || !(x > 0)) return UNKNOWN;
    const [lead, exponent] = x.toExponential(digits).split("e");
    return `${lead}×10${superscript(+exponent)}`;
  };

  const fixed = (x, digits) => (x == null ? UNKNOWN : x.toFixed(digits));
  const percent = (x, digits = 1) => (x == null ? UNKNOWN : `${(100 * x).toFixed(digits)}%`);

  const signed = (x, digits = 2) => {
    if (x == null) return UNKNOWN;
    return `${x < 0 ? "−" : "+"}${Math.abs(100 * x).toFixed(digits)}%`;
  };

  const duration = (s) => {
    if (s == null) return UNKNOWN;
    if (s < 1) return "under 1 s";
    if (s < 90) return `${Math.round(s)} s`;
    if (s < 5400) return `${Math.round(s / 60)} min`;
    if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
    return `${(s / 86400).toFixed(1)} days`;
  };

  const number = (x, digits = 4) => {
    if (x == null) return UNKNOWN;
    const extreme = Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3);
    return extreme ? x.toExponential(2) : String(+x.toPrecision(digits));
  };

  const clock = (s) => new Date(s * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";

  // Raise exponents (C^−0.05), and set text in `backticks` as code.
  const typeset = (text) => {
    const parts = text.split(/(\^−?(?:\d+(?:\.\d+)?|\p{L}+)|`[^`]+`)/u);
    return parts.map((part) => {
      if (part[0] === "^") return el("sup", { textContent: part.slice(1) });
      if (part[0] === "`") return el("code", { textContent: part.slice(1, -1) });
      return part;
    });
  };

  // ── tiles and tables ───────────────────────────────────────────────────────────────────────────

  const tile = (label, value, more) => {
    const node = el("div", { className: "tile" }, el("dt", { textContent: label }));
    node.append(el("dd", {}, ...typeset(String(value))));
    if (more) node.append(el("dd", { className: "quiet", textContent: more }));
    return node;
  };

  // The first column names the rows. On a phone each row becomes a card with the column's labels.
  const table = (node, labels, rows) => {
    const cell = (content, column) => {
      const children = content instanceof Node ? [content] : typeset(String(content));
      const made = el(column ? "td" : "th", {}, ...children);
      if (column) made.dataset.label = labels[column];
      else made.scope = "row";
      return made;
    };
    const heads = labels.map((label) => el("th", { scope: "col", textContent: label }));
    const body = rows.map((cells) => el("tr", {}, ...cells.map(cell)));
    fill(node, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
  };

  // ── colors ─────────────────────────────────────────────────────────────────────────────────────

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Viridis: perceptually even, and safe for every kind of color blindness.
  const VIRIDIS = [
    "#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725",
  ];
  const viridis = (share) => {
    // Use the part of the scale that stands out from the background.
    const [low, high] = dark.matches ? [0.42, 1] : [0.04, 0.76];
    const place = (low + (high - low) * share) * (VIRIDIS.length - 1);
    const i = Math.min(Math.floor(place), VIRIDIS.length - 2);
    const channel = (color, k) => parseInt(color.slice(1 + 2 * k, 3 + 2 * k), 16);
    const mixed = [0, 1, 2].map((k) => {
      const [from, to] = [channel(VIRIDIS[i], k), channel(VIRIDIS[i + 1], k)];
      return Math.round(from + (to - from) * (place - i));
    });
    return `rgb(${mixed})`;
  };

  const rankColor = (list, item) => {
    if (list.length < 2) return viridis(0.5);
    return viridis(Math.max(0, list.indexOf(item)) / (list.length - 1));
  };
  const sizeColor = (size) => rankColor(iso.sizes, size);

  // Okabe and Ito's palette for things without an order.
  const PALETTE = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#7f7f7f",
  ];
  const paletteColor = (i) => PALETTE[i % PALETTE.length];
  const fade = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `,${alpha})`);

  // ── charts ─────────────────────────────────────────────────────────────────────────────────────
  // A chart is drawn when Plotly has loaded and the chart is near the screen. Until then the newest
  // request waits.

  const waiting = new Map(); // node → [traces, layout]
  const drawn = new Set();
  let ready = false;

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        entry.target.nearScreen = entry.isIntersecting;
        paint(entry.target);
      }
    },
    { rootMargin: "300px" },
  );

  function fullLayout(layout) {
    const phone = innerWidth < 640;
    const axis = {
      gridcolor: theme("--grid"),
      zeroline: false,
      linecolor: theme("--line"),
      exponentformat: "power",
      fixedrange: phone,
    };
    const minor = { ticks: "outside", ticklen: 3, tickcolor: theme("--line"), dtick: "D1" };
    const full = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: false,
      hovermode: "closest",
      font: { family: theme("--font"), color: theme("--quiet"), size: 12 },
      hoverlabel: {
        bgcolor: theme("--card"),
        bordercolor: theme("--line"),
        font: { color: theme("--ink") },
        align: "left",
      },
      margin: { l: phone ? 46 : 60, r: 12, t: 8, b: 44 },
      uirevision: layout.key ?? "same", // zoom and pan survive an update with the same key
      ...layout,
      xaxis: { ...axis, ...(layout.xaxis?.dtick === 1 && { minor }), ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    };
    if (phone) delete full.yaxis.title;
    return full;
  }

  function paint(node) {
    const request = waiting.get(node);
    if (!ready || !request || !node.nearScreen || !node.isConnected) return;
    waiting.delete(node);
    drawn.add(node);
    const [traces, layout] = request;
    Plotly.react(node, traces, fullLayout(layout), { responsive: true, displayModeBar: false });
  }

  const plot = (id, traces, layout) => {
    const node = typeof id === "string" ? $(id) : id;
    if (!waiting.has(node) && !drawn.has(node)) observer.observe(node);
    waiting.set(node, [traces, layout]);
    paint(node);
  };

  const forget = (node) => {
    observer.unobserve(node);
    waiting.delete(node);
    if (drawn.delete(node)) Plotly.purge(node);
  };

  // Plotly is the last script, so it has loaded when this event fires.
  document.addEventListener("DOMContentLoaded", () => {
    ready = true;
    for (const node of [...waiting.keys()]) paint(node);
  });

  const lossAxis = (range, title) => ({ type: "log", title: { text: title }, range, nticks: 9 });

  const logAxis = (title) => ({ type: "log", title: { text: title }, dtick: 1 });

  // An interval as two traces: the space between them is filled.
  const band = (x, low, high) => {
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", name: "interval" };
    const fillcolor = theme("--law") + (dark.matches ? "26" : "1a");
    return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor }];
  };

  const verticalLine = (x, line) =>
    ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line });

  // The range of a log axis around the values, with a margin on both sides.
  const padded = (values, share) => {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
      if (value == null || !(value > 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (!Number.isFinite(low)) return undefined;
    const [from, to] = [Math.log10(low), Math.log10(high)];
    const margin = (to - from || 0.2) * share;
    return [from - margin, to + margin];
  };

  Object.assign(iso, {
    $, el, fill, fillSelect, setText, escapeHtml, short, power, fixed, percent, signed, duration,
    number, clock, typeset, tile, table, dark, theme, viridis, rankColor, sizeColor, paletteColor,
    fade, plot, forget, lossAxis, logAxis, band, verticalLine, padded,
  });
})();
