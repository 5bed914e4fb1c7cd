"use strict";
// The explorer's controls: every change asks the server, and the address holds the question.
(() => {
  const form = document.getElementById("question");
  if (form) explore(form);
  const pair = document.getElementById("pair");
  if (pair) compareRuns(pair);

  function explore(form) {
    const state = document.getElementById("state"), answer = document.getElementById("answer");
    const layout = form.elements.layout, compare = document.getElementById("compare");
    const usual = new URLSearchParams(new FormData(form));
    let asked = null, timer = 0, running = null;

    const toNumber = (slider) => slider.dataset.scale === "speed" ? Number((2 ** (slider.value / 2)).toPrecision(3)) : 2 ** slider.value;
    const toSlider = (slider, number) => Math.round(Math.log2(number) * (slider.dataset.scale === "speed" ? 2 : 1));
    const sliders = [...form.querySelectorAll('input[type="range"]')];
    function follow(slider) {
      const number = Number(form.elements[slider.dataset.for].value);
      if (number > 0) slider.value = toSlider(slider, number);
      slider.setAttribute("aria-valuetext", form.elements[slider.dataset.for].value || "the model's");
    }
    for (const slider of sliders) {
      const number = form.elements[slider.dataset.for];
      slider.addEventListener("input", () => { number.value = toNumber(slider); slider.setAttribute("aria-valuetext", number.value); later(); });
      number.addEventListener("input", () => { follow(slider); later(); });
    }

    function read() {  // the question of the address
      const given = new URLSearchParams(location.hash.slice(1));
      for (const [key, value] of new URLSearchParams(usual)) {
        const field = form.elements[key], wanted = given.get(key) ?? value;
        if (field instanceof RadioNodeList) for (const each of field) each.checked = each.value === wanted; else field.value = wanted;
      }
      sliders.forEach(follow);
    }
    function question() {
      const made = new URLSearchParams();
      for (const [key, value] of new FormData(form)) {
        if (value !== "" && (value !== usual.get(key) || key === "model" || key === "cluster" || key === "devices" || key === "batch")) made.set(key, value.trim());
      }
      return made.toString();
    }

    function later() { clearTimeout(timer); timer = setTimeout(ask, 120); answer.setAttribute("aria-busy", "true"); }
    async function ask() {
      clearTimeout(timer);
      const query = question();
      if (query === asked) { if (!answer.classList.contains("waiting")) answer.removeAttribute("aria-busy"); return; }
      asked = query;
      history.replaceState(null, "", `#${query}`);
      if (running) running.abort();
      const mine = running = new AbortController();
      answer.classList.add("waiting");
      answer.setAttribute("aria-busy", "true");
      state.textContent = "Looking for layouts \u2026";
      try {
        const found = await fetch(`/explore/answer?${query}`, { signal: mine.signal }), text = await found.text();
        if (mine !== running) return;
        show(text, found.ok);
        const figure = answer.querySelector("figure[data-source]");
        if (figure) await meshwrightTimeline.load(figure, figure.dataset.source, mine.signal);
      } catch (error) {
        if (error.name === "AbortError") return;
        state.textContent = "The explorer does not answer. Is `meshwright ui` still running?";
        asked = null;
      } finally {
        if (mine === running) { answer.classList.remove("waiting"); answer.removeAttribute("aria-busy"); answer.dataset.shown = query; }
      }
    }
    function show(text, found) {
      const open = answer.querySelector("#layouts")?.open, focus = document.activeElement;
      const again = answer.contains(focus) && focus.name === "choice" ? focus.value : null;
      answer.innerHTML = text;  // HTML of our own server, in which all names are escaped
      const layouts = answer.querySelector("#layouts");
      if (layouts && open !== undefined) layouts.open = open;
      if (again !== null) [...answer.querySelectorAll('input[name="choice"]')].find((each) => each.value === again)?.focus();
      const verdict = answer.querySelector(".verdict strong"), step = answer.querySelector(".verdict dd");
      state.textContent = found ? `${verdict.textContent}, a step takes ${step.textContent}.` : "There is no answer to this question.";
      pinned();
    }
    function choose(words) { layout.value = words; ask(); }

    answer.addEventListener("change", (event) => { if (event.target.name === "choice") choose(event.target.value); });
    answer.addEventListener("click", async (event) => {
      const point = event.target.closest("circle[data-key]"), copy = event.target.closest("button.copy");
      if (point) choose(point.dataset.key);
      if (copy) {
        try { await navigator.clipboard.writeText(copy.dataset.copy); copy.textContent = "Copied"; }
        catch { getSelection().selectAllChildren(copy.previousElementSibling); copy.textContent = "Marked"; }
        setTimeout(() => { copy.textContent = "Copy"; }, 2000);
      }
    });
    form.addEventListener("change", (event) => { if (event.target.type !== "range" && event.target.type !== "number") ask(); });
    form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
    document.getElementById("fastest").addEventListener("click", () => choose(""));

    const KEPT = "meshwright-kept";
    function full() {  // the question with the layout that is shown
      const words = answer.querySelector('input[name="choice"]:checked')?.value ?? layout.value;
      const made = new URLSearchParams(question());
      if (words) made.set("layout", words);
      return `layout:${made}`;
    }
    function pinned() {
      const kept = sessionStorage.getItem(KEPT);
      compare.hidden = !kept;
      if (kept) compare.href = `/compare?${new URLSearchParams({ old: kept, new: full() })}`;
    }
    document.getElementById("pin").addEventListener("click", () => { sessionStorage.setItem(KEPT, full()); pinned(); state.textContent = "Kept. Choose another layout or other sizes, then compare."; });
    addEventListener("hashchange", () => { read(); ask(); });
    read();
    ask();
  }

  function compareRuns(pair) {
    const button = document.getElementById("compare-runs"), state = document.getElementById("pair-state");
    function update() {
      const marked = [...pair.querySelectorAll('input[type="checkbox"]:checked')];
      [pair.elements.new.value, pair.elements.old.value] = [marked[0]?.value ?? "", marked[1]?.value ?? ""];
      button.disabled = marked.length !== 2;
      state.textContent = marked.length === 2 ? "" : marked.length > 2 ? "Mark only two runs." : "Mark two runs.";
    }
    pair.addEventListener("change", update);
    update();
  }
})();
