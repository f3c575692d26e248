// Scores during the runs: of tasks against compute, and of in-context learning against tokens. One
// line per run, colored by its size, with a larger marker at its end.
(() => {
  "use strict";
  const { $, fillSelect, escapeHtml, sizeColor, power, short, plot, theme } = iso;
  const IN_CONTEXT = "in_context/";

  const members = () => [...iso.runs.values()].filter(({ row }) => !iso.hidden.has(row.size));

  const AXES = {
    flops: { title: "training compute (FLOPs)", at: (flops) => `${power(flops)} FLOPs` },
    tokens: { title: "training tokens", at: (tokens) => `${short(tokens)} tokens` },
  };

  function draw(id, key, axis, title, more = [], yaxis = {}) {
    const traces = members()
      .filter(({ curves }) => curves.tasks[key])
      .map(({ row, curves: { tasks } }) => ({
        x: tasks[axis],
        y: tasks[key],
        customdata: tasks[axis].map(AXES[axis].at),
        mode: "lines+markers",
        name: row.name,
        line: { color: sizeColor(row.size), width: 2 },
        marker: {
          size: tasks[axis].map((_, i) => (i === tasks[axis].length - 1 ? 10 : 5)),
          color: sizeColor(row.size),
          line: { color: theme("--card"), width: 1 },
        },
        hovertemplate: `<b>${escapeHtml(row.name)}</b><br>%{y:.4~g}<br>%{customdata}<extra></extra>`,
      }));
    // Runs are drawn after forecasts, so that a forecast hides no measured score.
    plot(id, [...more, ...traces], {
      key,
      xaxis: { type: "log", title: { text: AXES[axis].title }, nticks: 6 },
      yaxis: { title: { text: title }, ...yaxis },
    });
  }

  function drawTask() {
    const key = $("task").value;
    const made = (iso.law().task_forecasts ?? []).filter(({ task }) => key === `${task}/accuracy`);
    const forecasts = made.map((f) => iso.forecastTrace(f, f.C, 1));
    draw("task-chart", key, "flops", key.endsWith("/bpb") ? "bits per byte" : "accuracy", forecasts);
  }

  iso.drawTasks = () => {
    const keys = members().flatMap(({ curves }) => Object.keys(curves.tasks));
    const scores = [...new Set(keys)].filter((key) => key.includes("/")).sort();
    const names = scores.filter((key) => !key.startsWith(IN_CONTEXT));
    $("tasks").hidden = !names.length;
    if (names.length) {
      fillSelect($("task"), names.map((key) => [key, key.replace("/", ": ")]));
      drawTask();
    }
    $("in-context").hidden = names.length === scores.length;
    if (names.length < scores.length) {
      draw("in-context-score", `${IN_CONTEXT}score`, "tokens", "nats");
      // The whole scale, on which noise below 0.05 stays flat and an induction head near 1 stands out.
      const whole = { range: [0, 1] };
      draw("prefix-matching", `${IN_CONTEXT}prefix_matching`, "tokens", "best head", [], whole);
    }
  };

  $("task").addEventListener("input", drawTask);
})();
