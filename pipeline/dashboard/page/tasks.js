// Scores of tasks against compute: one line per run, colored by its size.
(() => {
  "use strict";
  const { $, el, fill, escapeHtml, sizeColor, power, plot } = iso;

  const members = () => [...iso.runs.values()].filter(({ row }) => !iso.hidden.has(row.size));

  function drawTask() {
    const key = $("task").value;
    const traces = members()
      .filter(({ curves }) => curves.tasks[key])
      .map(({ row, curves: { tasks } }) => ({
        x: tasks.flops,
        y: tasks[key],
        customdata: tasks.flops.map((flops) => power(flops)),
        mode: "lines+markers",
        name: row.name,
        line: { color: sizeColor(row.size), width: 2 },
        marker: { size: 5, color: sizeColor(row.size) },
        hovertemplate: `<b>${escapeHtml(row.name)}</b><br>%{y:.4~g}<br>%{customdata} FLOPs<extra></extra>`,
      }));
    plot("task-chart", traces, {
      key,
      xaxis: { type: "log", title: { text: "training compute (FLOPs)" }, nticks: 6 },
      yaxis: { title: { text: key.endsWith("/bpb") ? "bits per byte" : "accuracy" } },
    });
  }

  iso.drawTasks = () => {
    const keys = members().flatMap(({ curves }) => Object.keys(curves.tasks));
    const names = [...new Set(keys)].filter((key) => key.includes("/")).sort();
    $("tasks").hidden = !names.length;
    if (!names.length) return;
    const select = $("task");
    const before = select.value;
    fill(select, ...names.map((key) => el("option", { value: key, textContent: key.replace("/", ": ") })));
    if (names.includes(before)) select.value = before;
    drawTask();
  };

  $("task").addEventListener("input", drawTask);
})();
