// Where the page's data come from: the file itself, or a server that is asked again and again for what has changed.
(() => {
  "use strict";
  const { $, el, put, say, clock } = iso;
  const EVERY_MS = 2000, inside = $("data") && JSON.parse($("data").textContent);
  let known = { boot: "", revision: 0, laws: -1 };

  iso.sizes = [];
  iso.law = () => iso.laws.find((l) => l.group === iso.group) ?? iso.laws[0] ?? {};
  // A path below api/; null where there is no such thing.
  iso.ask = async (path) => {
    if (inside) return path.startsWith("runs/") ? inside.pages[path.slice(5)] ?? null : inside[path];
    const answer = await fetch(`api/${path}`, { cache: "no-cache" });
    if (answer.status === 404 || answer.status === 422) return null;
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  };

  function groups() {
    const choice = $("group"), there = iso.laws.map((l) => l.group).join();
    if (choice.dataset.there !== there) {
      choice.dataset.there = there;
      put(choice, ...iso.laws.map((l) => el("option", { value: l.group, textContent: `${l.label} (${l.runs} runs)` })));
      if (iso.laws.some((l) => l.group === iso.group)) choice.value = iso.group;
    }
    $("group-label").hidden = iso.laws.length < 2;
  }
  function take(news, laws) {
    iso.head = news;
    for (const run of news.runs) iso.runs.set(run.row.id, run);
    const there = new Set(news.ids);
    for (const id of iso.runs.keys()) if (!there.has(id)) iso.runs.delete(id);
    if (laws) iso.laws = laws;
    iso.sizes = [...new Set([...iso.runs.values()].map((r) => r.row).sort((a, b) => a.N - b.N).map((row) => row.size))];
    if (news.revision !== known.revision || laws) all(Boolean(laws), news.runs);
    const notes = [...news.notes, ...(news.reading ? [news.reading[1] ? `Read ${news.reading[0]} of ${news.reading[1]} runs …` : "Reading …"] : [])];
    put($("notes"), ...notes.map((note) => el("li", { textContent: note })));
  }
  function all(laws = true, changed = [...iso.runs.values()]) {
    document.title = `${iso.head.title} · Isoflop`;
    say($("title"), iso.head.title);
    $("empty").hidden = iso.runs.size > 0 || Boolean(iso.head.reading);
    groups();
    say($("convention"), iso.law().convention ? `How N and FLOPs are counted: ${iso.law().convention}.` : "");
    route(changed);
    iso.drawLoss();
    if (laws) iso.drawLaw();
    iso.drawRuns();
    iso.drawCompare();
  }
  function route(changed) {
    const id = /^#run\/([0-9a-f]+)$/.exec(location.hash)?.[1], was = $("run").hidden;
    $("run").hidden = !id;
    $("overview").hidden = Boolean(id) || iso.runs.size === 0;
    const fresh = was || $("run").dataset.id !== id;
    if (id && (fresh || changed.some((r) => r.row.id === id))) iso.runPage(id).then(() => { if (fresh) { scrollTo(0, 0); $("run-title").focus(); } });
    else if (!id && !was && location.hash) $(location.hash.slice(1))?.scrollIntoView();
  }

  async function look() {
    let wait = EVERY_MS;
    try {
      let news = await iso.ask(`runs?since=${known.revision}`);
      if (news.boot !== known.boot && known.revision) news = await iso.ask("runs?since=0"); // the server was started anew
      const laws = news.laws_revision !== known.laws || news.boot !== known.boot ? await iso.ask("laws") : null;
      take(news, laws);
      known = { boot: news.boot, revision: news.revision, laws: news.laws_revision };
      $("when").className = "quiet live";
      say($("when"), `live · ${clock(news.time)}`);
    } catch (error) {
      $("when").className = "quiet";
      say($("when"), "the server does not answer; trying again");
      wait *= 3;
    }
    setTimeout(look, document.hidden ? 5 * wait : wait);
  }

  $("group").addEventListener("input", () => { iso.group = $("group").value; all(); });
  addEventListener("hashchange", () => route([]));
  iso.dark.addEventListener("change", () => all());
  if (inside) { take(inside.runs, inside.laws); say($("when"), `written ${clock(inside.runs.time)}`); } else look();
})();
