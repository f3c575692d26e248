// Runs, architectures or sizes at equal compute, by interpolation of their held-out losses on log axes.
(() => {
  "use strict";
  const { $, el, plain, power, fixed, signed, number, say, side, table, plot, lossAxis, padded, theme } = iso;

  const along = (x, xs, ys) => { // on log axes; null outside
    if (!(x >= xs[0] * (1 - 1e-9) && x <= xs.at(-1) * (1 + 1e-9))) return null;
    let i = xs.findIndex((v) => v >= x);
    if (i < 0) i = xs.length - 1;
    if (i === 0 || xs[i] === x) return ys[i];
    const t = Math.log(x / xs[i - 1]) / Math.log(xs[i] / xs[i - 1]);
    return ys[i - 1] * (ys[i] / ys[i - 1]) ** t;
  };
  const curve = ({ curves: { held_out, train } }) => {
    const c = held_out.loss.length > 1 ? held_out : train;
    const kept = c.flops.map((f, i) => [f, c.loss[i]]).filter(([f, l]) => f > 0 && l > 0);
    return { C: kept.map((p) => p[0]), loss: kept.map((p) => p[1]) };
  };
  // The lowest of several curves at each compute that any of them has reached.
  function envelope(members) {
    const lines = members.map(curve).filter((l) => l.C.length > 1), C = [...new Set(lines.flatMap((l) => l.C))].sort((a, b) => a - b);
    let least = Infinity;
    const loss = C.map((c) => (least = Math.min(least, ...lines.map((l) => along(c, l.C, l.loss) ?? Infinity))));
    return { C, loss };
  }
  function sides() {
    const how = $("sides").value, all = [...iso.runs.values()];
    if (how === "runs") return all.filter((r) => iso.ticked.has(r.row.id)).map((r) => ({ name: r.row.name, ...curve(r) })).filter((s) => s.C.length > 1);
    const names = how === "size" ? iso.sizes : [...new Set(all.map((r) => r.row.arch))];
    return names.map((name) => ({ name, ...envelope(all.filter((r) => r.row[how] === name)) })).filter((s) => s.C.length > 1).slice(0, 12);
  }

  function draw() {
    if (!iso.compared) $("sides").value = new Set([...iso.runs.values()].map((r) => r.row.arch)).size > 1 ? "arch" : "size";
    // from where a second one begins to where all but one have ended: between, some two can be held together
    const found = sides(), [, from] = found.map((s) => s.C[0]).sort((a, b) => a - b), [, to] = found.map((s) => s.C.at(-1)).sort((a, b) => b - a);
    const enough = found.length > 1;
    $("compare-body").hidden = !enough;
    say($("compare-words"), enough ? (to > from ? "" : "Their computes do not overlap: each is shown, none can be held against another.")
      : { runs: "Tick two or more runs in the table above.", arch: "All runs here are of one architecture; a dense and a mixture-of-experts ladder would be compared by their frontiers.", size: "All runs here are of one size." }[$("sides").value]);
    if (!enough) return;
    const C = to > from ? from * (to / from) ** (+$("equal").value / 100) : null;
    say($("equal-out"), `${power(C)} FLOPs`);
    const shown = found.map((s, i) => ({ x: s.C, y: s.loss, mode: "lines", line: { color: side(i), width: 2.2, dash: ["solid", "dash", "dot", "dashdot"][Math.floor(i / 8) % 4] }, text: s.C.map((C) => power(C)), hovertemplate: `<b>${plain(s.name)}</b><br>%{text} FLOPs: %{y:.4f}<extra></extra>` }));
    plot("compare-chart", shown, { key: found.map((s) => s.name).join(), xaxis: { type: "log", title: { text: "training compute (FLOPs)" }, dtick: 1 }, yaxis: lossAxis(padded(found.flatMap((s) => s.loss.slice(Math.floor(s.loss.length / 8))), 0.05), "held-out loss (nats per token)"),
      shapes: C ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: C, x1: C, line: { color: theme("--quiet"), width: 1, dash: "dot" } }] : [] });
    const base = found.find((s) => C && along(C, s.C, s.loss)) ?? found[0], there = C && along(C, base.C, base.loss), down = [...base.loss].map((l, i) => Math.min(...base.loss.slice(0, i + 1)));
    table($("compare-table"), [{ runs: "Run", arch: "Architecture", size: "Size" }[$("sides").value], "Loss there", `Against ${base.name}`, `Compute ${base.name} needs for it`], found.map((s, i) => {
      const loss = C && along(C, s.C, s.loss), need = loss && along(1 / loss, down.map((l) => 1 / l), base.C);
      return [el("span", {}, Object.assign(el("span", { className: "dot" }), { style: `background:${side(i)}` }), s.name), fixed(loss, 4), s !== base && loss ? signed(loss / there - 1) : "–", s !== base && need ? `${number(+(need / C).toPrecision(3))}×` : "–"];
    }));
  }
  $("sides").addEventListener("input", () => { iso.compared = true; draw(); });
  $("equal").addEventListener("input", draw);
  iso.drawCompare = draw;
})();
