// Zoom, pan and tooltips of the timelines. Without it the page shows the same pictures and tables.
"use strict";
(() => {
  const WIDTH = 100000, ROW = 26, PASSES = 17, MOST_APART = 240;
  const UNITS = [["d", 86400, 172800], ["h", 3600, 7200], ["min", 60, 120], ["s", 1, 1], ["ms", 1e-3, 1e-3], ["us", 1e-6, 1e-6], ["ns", 1e-9, 0]];
  const unitOf = (seconds) => UNITS.find(([, , least]) => Math.abs(seconds) >= least * 0.99995);
  const three = (number) => Math.abs(number) >= 999.5 ? Math.round(number).toLocaleString("en") : number.toPrecision(3);
  const words = (seconds, unit = unitOf(seconds)) => `${three(seconds / unit[1])} ${unit[0]}`;
  const data = [...document.querySelectorAll("script.data")].map((each) => JSON.parse(each.textContent));

  function ticks(from, to) {
    const unit = unitOf(to), span = (to - from) / unit[1], found = [];
    let size = 10 ** Math.floor(Math.log10(span / 6));
    size *= [1, 2, 5, 10].find((times) => span / (size * times) <= 6);
    for (let number = Math.ceil(from / unit[1] / size); number * size * unit[1] <= to; number++)
      found.push([(number * size * unit[1] - from) / (to - from), `${Number((number * size).toPrecision(6)).toLocaleString("en", {maximumFractionDigits: 9})} ${unit[0]}`]);
    return found;
  }

  // A phone hides its scroll bars: say that a table goes on.
  for (const box of document.querySelectorAll(".scroll")) {
    const hint = document.createElement("span");
    hint.className = "more";
    hint.textContent = "more to the right \u2192";
    hint.setAttribute("aria-hidden", "true");
    box.before(hint);
    const tell = () => { hint.hidden = box.scrollLeft + box.clientWidth >= box.scrollWidth - 4; };
    box.addEventListener("scroll", tell, {passive: true});
    new ResizeObserver(tell).observe(box);
  }

  for (const figure of document.querySelectorAll("figure.timeline")) {
    const drawn = data[figure.dataset.plan].timelines[figure.dataset.number];
    const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg");
    const axis = plot.querySelector(".axis"), tip = figure.querySelector(".tip");
    const height = svg.viewBox.baseVal.height, step = drawn.step_seconds;
    const most = Math.max(...drawn.stages.map((bars) => bars.length));
    let from = 0, to = 1;

    function show(left, right) {
      const width = Math.min(1, Math.max(right - left, 1e-4));
      from = Math.min(Math.max(left, 0), 1 - width);
      to = from + width;
      svg.setAttribute("viewBox", `${from * WIDTH} 0 ${width * WIDTH} ${height}`);
      plot.classList.toggle("apart", most * width <= MOST_APART);
      const place = (part) => 100 * (part - from) / width;
      axis.replaceChildren(...ticks(from * step, to * step).map(([part, text]) => {
        const span = document.createElement("span");
        span.textContent = text;
        span.style.left = `${100 * part}%`;
        if (part > 0.93) span.className = "end";
        return span;
      }));
      for (const name of plot.querySelectorAll(".phase-name")) {
        const start = Math.max(place(+name.dataset.from), 0), end = Math.min(place(+name.dataset.to), 100);
        name.style.left = `${start}%`;
        name.style.width = `${Math.max(end - start, 0)}%`;
        name.hidden = end - start < 8;
      }
    }
    function zoom(factor, at = 0.5) {
      const middle = from + (to - from) * at, width = (to - from) * factor;
      show(middle - width * at, middle + width * (1 - at));
    }
    const move = (part) => show(from + (to - from) * part, to + (to - from) * part);
    const acts = {all: () => show(0, 1), in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.4), right: () => move(0.4)};

    figure.querySelector(".tools").hidden = false;
    for (const button of figure.querySelectorAll("button")) {
      button.addEventListener("click", () => button.dataset.do ? acts[button.dataset.do]() : show(+button.dataset.from, +button.dataset.to));
    }
    plot.addEventListener("keydown", (event) => {
      const act = {ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", Home: "all", "0": "all"}[event.key];
      if (act && !event.ctrlKey && !event.metaKey) { acts[act](); event.preventDefault(); }
    });
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
    }, {passive: false});
    let held = null;
    plot.addEventListener("pointerdown", (event) => { held = event.clientX; });
    window.addEventListener("pointerup", () => { held = null; });
    plot.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      if (held !== null && Math.abs(event.clientX - held) > 3) {
        move((held - event.clientX) / box.width);
        held = event.clientX;
        return;
      }
      tip.textContent = told((event.clientX - box.left) / box.width, event.clientY - box.top);
    });
    function told(x, y) {
      const stage = Math.floor(y / ROW), bars = drawn.stages[stage];
      if (!bars || x < 0 || x > 1) return "";
      const at = (from + (to - from) * x) * step, slack = (to - from) * step / 800, inRow = y - stage * ROW;
      const lane = inRow < PASSES ? null : inRow < PASSES + 3 ? "activations" : "gradients";
      const hit = bars.find(([name, , start, end]) => (lane ? drawn.names[name] === lane : !["activations", "gradients"].includes(drawn.names[name])) && start - slack <= at && at <= end + slack);
      const unit = unitOf(step);
      if (!hit) return `stage ${stage}, ${words(at, unit)}: ${lane ? "sends no " + lane : "waits"}`;
      const [name, microbatch, start, end, receiver] = hit;
      const what = `${drawn.names[name]}${microbatch >= 0 ? " of microbatch " + microbatch : ""}${receiver === undefined ? "" : " to stage " + receiver}`;
      return `stage ${stage}, ${what}: ${words(end - start)}, from ${words(start, unit)}`;
    }
    show(0, 1);
  }
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
})();
