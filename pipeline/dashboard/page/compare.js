// Compare runs, architectures or sizes at equal compute, by their held-out losses on log axes.
(() => {
  "use strict";
  const {
    $, el, setText, escapeHtml, power, fixed, signed, number, paletteColor, table, plot, lossAxis,
    logAxis, verticalLine, padded, theme,
  } = iso;
  const MAX_SIDES = 12;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const HEADS = { runs: "Run", arch: "Architecture", size: "Size" };
  const TOO_FEW = {
    runs: "Select two or more runs in the table above.",
    arch: "All runs here have one architecture. With two, their frontiers are compared.",
    size: "All runs here have one size.",
  };
  const APART = "Their compute does not overlap, so there is nothing to compare.";

  // Interpolate y at x on log axes; null outside the known range.
  const interpolate = (x, xs, ys) => {
    const inside = x >= xs[0] * (1 - 1e-9) && x <= xs.at(-1) * (1 + 1e-9);
    if (!inside) return null;
    let i = xs.findIndex((v) => v >= x);
    if (i < 0) i = xs.length - 1;
    if (i === 0 || xs[i] === x) return ys[i];
    const share = Math.log(x / xs[i - 1]) / Math.log(xs[i] / xs[i - 1]);
    return ys[i - 1] * (ys[i] / ys[i - 1]) ** share;
  };

  // The held-out losses of a run. Losses of training batches are too noisy to be compared.
  const curve = ({ curves: { held_out: { flops, loss } } }) => {
    const points = flops.map((C, i) => [C, loss[i]]).filter((p) => p[0] > 0 && p[1] > 0);
    return { C: points.map((p) => p[0]), loss: points.map((p) => p[1]) };
  };

  // The lowest loss that any of these runs has reached at each compute. A run that was evaluated
  // once adds one point, so that the ends of several runs make a curve.
  function envelope(members) {
    const lines = members.map(curve).filter((line) => line.C.length);
    const C = [...new Set(lines.flatMap((line) => line.C))].sort((a, b) => a - b);
    let best = Infinity;
    const loss = C.map((c) => {
      const here = lines.map((line) => interpolate(c, line.C, line.loss) ?? Infinity);
      best = Math.min(best, ...here);
      return best;
    });
    return { C, loss };
  }

  // Every side of the comparison: its name and its curve, which may be too short to compare.
  function sides() {
    const kind = $("sides").value;
    const runs = [...iso.runs.values()];
    if (kind === "runs") {
      const selected = runs.filter((run) => iso.selected.has(run.row.id));
      return selected.map((run) => ({ name: run.row.name, ...curve(run) }));
    }
    const names = kind === "size" ? iso.sizes : [...new Set(runs.map((run) => run.row.arch))];
    const members = (name) => runs.filter((run) => run.row[kind] === name);
    return names.map((name) => ({ name, ...envelope(members(name)) }));
  }

  // One sentence about the sides that were not evaluated often enough.
  function leftOut(short) {
    if (!short.length) return "";
    const others = short.length > 5 ? ` and ${short.length - 5} others` : "";
    const names = short.slice(0, 5).map((side) => side.name).join(", ") + others;
    const often = short.every((side) => side.C.length) ? "once" : "at most once";
    return `${names}: evaluated ${often} and not compared. Set train.eval_every to compare curves.`;
  }

  function drawChart(found, C) {
    const traces = found.map((side, i) => ({
      x: side.C,
      y: side.loss,
      mode: side.C.length > 30 ? "lines" : "lines+markers",
      line: { color: paletteColor(i), width: 2.2, dash: DASHES[Math.floor(i / 8) % DASHES.length] },
      text: side.C.map((c) => power(c)),
      hovertemplate: `<b>${escapeHtml(side.name)}</b><br>%{text} FLOPs: %{y:.4f}<extra></extra>`,
    }));
    const cursor = verticalLine(C, { color: theme("--quiet"), width: 1, dash: "dot" });
    // Without the first eighth of each curve, where the loss falls steeply.
    const losses = found.flatMap((side) => side.loss.slice(Math.floor(side.loss.length / 8)));
    plot("compare-chart", traces, {
      key: found.map((side) => side.name).join(),
      xaxis: logAxis("training compute (FLOPs)"),
      yaxis: lossAxis(padded(losses, 0.05), "held-out loss (nats per token)"),
      shapes: C ? [cursor] : [],
    });
  }

  function drawTable(found, C) {
    const at = (side) => C && interpolate(C, side.C, side.loss);
    const base = found.find(at) ?? found[0];
    const baseLoss = at(base);
    // The best loss so far falls with compute, so `interpolate` can use 1/loss as an x axis.
    let best = Infinity;
    const inverse = base.loss.map((loss) => {
      best = Math.min(best, loss);
      return 1 / best;
    });
    const row = (side, i) => {
      const loss = at(side);
      const needed = loss && interpolate(1 / loss, inverse, base.C);
      const dot = Object.assign(el("span", { className: "dot" }), {
        style: `background:${paletteColor(i)}`,
      });
      return [
        el("span", {}, dot, side.name),
        fixed(loss, 4),
        side !== base && loss ? signed(loss / baseLoss - 1) : "–",
        side !== base && needed ? `${number(needed / C, 3)}×` : "–",
      ];
    };
    const heads = [
      HEADS[$("sides").value],
      "Loss there",
      `Difference from ${base.name}`,
      `Compute of ${base.name} for this loss`,
    ];
    table($("compare-table"), heads, found.map(row));
  }

  function draw() {
    if (!iso.sidesChosen) {
      const architectures = new Set([...iso.runs.values()].map((run) => run.row.arch));
      $("sides").value = architectures.size > 1 ? "arch" : "size";
    }
    const kind = $("sides").value;
    const all = sides();
    const comparable = all.filter((side) => side.C.length > 1);
    const found = kind === "runs" ? comparable : comparable.slice(0, MAX_SIDES);
    const words = leftOut(all.filter((side) => side.C.length < 2));
    $("compare-body").hidden = found.length < 2;
    if (found.length < 2) {
      setText($("compare-words"), all.length < 2 ? TOO_FEW[kind] : words);
      return;
    }
    // Two sides can be compared from where the second one starts to where the second to last ends.
    const from = found.map((side) => side.C[0]).sort((a, b) => a - b)[1];
    const to = found.map((side) => side.C.at(-1)).sort((a, b) => b - a)[1];
    const overlap = to > from;
    setText($("compare-words"), overlap ? words : `${APART} ${words}`);
    const C = overlap ? from * (to / from) ** (+$("equal").value / 100) : null;
    setText($("equal-out"), `${power(C)} FLOPs`);
    drawChart(found, C);
    drawTable(found, C);
  }

  $("sides").addEventListener("input", () => {
    iso.sidesChosen = true;
    draw();
  });
  $("equal").addEventListener("input", draw);
  iso.drawCompare = draw;
})();
