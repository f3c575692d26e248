// Load the data, from the file itself or from a server that is polled for changes, and draw.
(() => {
  "use strict";
  const { $, el, fill, fillSelect, setText, clock } = iso;
  const POLL_MS = 2000;
  const embedded = $("data") && JSON.parse($("data").textContent);
  let known = { boot: "", revision: 0, laws: -1 };

  // The law of the chosen group of runs.
  iso.law = () => iso.laws.find((law) => law.group === iso.group) ?? iso.laws[0] ?? {};

  // Fetch a path below api/; null if it does not exist.
  iso.fetch = async (path) => {
    if (embedded) {
      const isRun = path.startsWith("runs/");
      return isRun ? embedded.pages[path.slice("runs/".length)] ?? null : embedded[path];
    }
    const answer = await fetch(`api/${path}`, { cache: "no-cache" });
    if (answer.status === 404 || answer.status === 422) return null;
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  };

  function drawGroups() {
    const pairs = iso.laws.map((law) => [law.group, `${law.label} (${law.runs} runs)`]);
    fillSelect($("group"), pairs, iso.group);
    $("group-label").hidden = iso.laws.length < 2;
  }

  function sortedSizes() {
    const rows = [...iso.runs.values()].map((run) => run.row).sort((a, b) => a.N - b.N);
    return [...new Set(rows.map((row) => row.size))];
  }

  // Apply an answer of api/runs, and of api/laws if the laws have changed.
  function update(news, laws) {
    iso.head = news;
    for (const run of news.runs) iso.runs.set(run.row.id, run);
    const ids = new Set(news.ids);
    for (const id of iso.runs.keys()) if (!ids.has(id)) iso.runs.delete(id);
    if (laws) iso.laws = laws;
    iso.sizes = sortedSizes();
    if (news.revision !== known.revision || laws) drawAll(Boolean(laws), news.runs);
    const notes = [...news.notes];
    if (news.reading) {
      const [done, all] = news.reading;
      notes.push(all ? `Read ${done} of ${all} runs …` : "Reading …");
    }
    fill($("notes"), ...notes.map((note) => el("li", { textContent: note })));
  }

  function drawAll(laws = true, changed = [...iso.runs.values()]) {
    document.title = `${iso.head.title} · Isoflop`;
    setText($("title"), iso.head.title);
    $("empty").hidden = iso.runs.size > 0 || Boolean(iso.head.reading);
    drawGroups();
    const convention = iso.law().convention;
    setText($("convention"), convention ? `How N and FLOPs are counted: ${convention}.` : "");
    route(changed);
    iso.drawLoss();
    iso.drawTasks();
    if (laws) iso.drawLaw();
    iso.drawRuns();
    iso.drawCompare();
  }

  // Show the overview, or the page of the run in the address (#run/ID).
  function route(changed) {
    const id = /^#run\/([0-9a-f]+)$/.exec(location.hash)?.[1];
    const wasHidden = $("run").hidden;
    $("run").hidden = !id;
    $("overview").hidden = Boolean(id) || iso.runs.size === 0;
    const isNew = wasHidden || $("run").dataset.id !== id;
    if (id && (isNew || changed.some((run) => run.row.id === id))) {
      iso.drawRunPage(id).then(() => {
        if (!isNew) return;
        scrollTo(0, 0);
        $("run-title").focus();
      });
    } else if (!id && !wasHidden && location.hash) {
      $(location.hash.slice(1))?.scrollIntoView();
    }
  }

  async function poll() {
    let wait_ms = POLL_MS;
    try {
      let news = await iso.fetch(`runs?since=${known.revision}`);
      const restarted = news.boot !== known.boot; // then revisions count from 0 again
      if (restarted && known.revision) news = await iso.fetch("runs?since=0");
      const newLaws = restarted || news.laws_revision !== known.laws;
      update(news, newLaws ? await iso.fetch("laws") : null);
      known = { boot: news.boot, revision: news.revision, laws: news.laws_revision };
      $("when").className = "quiet live";
      setText($("when"), `live · ${clock(news.time)}`);
    } catch (error) {
      $("when").className = "quiet";
      setText($("when"), "the server does not answer; trying again");
      wait_ms *= 3;
    }
    setTimeout(poll, document.hidden ? 5 * wait_ms : wait_ms);
  }

  $("group").addEventListener("input", () => {
    iso.group = $("group").value;
    drawAll();
  });
  addEventListener("hashchange", () => route([]));
  iso.dark.addEventListener("change", () => drawAll());
  if (embedded) {
    update(embedded.runs, embedded.laws);
    setText($("when"), `written ${clock(embedded.runs.time)}`);
  } else {
    poll();
  }
})();
