/* Draws the charts of a report from the data beside them. No request is ever made: everything is in this page. */
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const page = read("page-data");
  const store = page.data;
  const roles = page.roles; // role -> the light colour, as charts in files carry it
  const views = new Map(); // chart element -> vega view

  // ---- data: columns in the page, rows for the charts ----
  const rowCache = new Map();
  function rows(name) {
    if (!rowCache.has(name)) {
      const columns = store[name];
      const names = Object.keys(columns);
      const count = names.length ? columns[names[0]].length : 0;
      rowCache.set(name, Array.from({ length: count }, (_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]]))));
    }
    return rowCache.get(name);
  }

  function text(tag, content, attributes = {}) {
    const element = document.createElement(tag);
    element.textContent = content;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  // perpend.rounding.cell, in this language
  function number(value, digits) {
    const size = Math.abs(value);
    if (size < 1e15 && (Number.isInteger(value) || size >= 10 ** (digits - 1))) return value.toFixed(0);
    const rounded = Number(value.toPrecision(digits));
    const tiny = Math.abs(rounded) < 1e-4 || size >= 1e15;
    return tiny ? rounded.toExponential().replace(/e([+-])(\d)$/, "e$10$2") : String(rounded);
  }
  const show = (value, digits = 4) =>
    value === null || value === undefined || value === "" ? "–"
      : typeof value === "number" ? number(value, digits)
      : typeof value === "boolean" ? (value ? "yes" : "no")
      : Array.isArray(value) ? value.map((one) => show(one, digits)).join(", ") : String(value);
  const words = (name) => name.replaceAll("_", " ");

  // ---- tooltip: text only, so nothing in the data can become markup ----
  const tip = document.body.appendChild(text("div", "", { class: "tip", hidden: "", role: "status" }));
  function tooltip(handler, event, item, value) {
    if (value === null || value === undefined || value === "") {
      tip.hidden = true;
      return;
    }
    tip.textContent = "";
    if (typeof value === "object") {
      const list = tip.appendChild(document.createElement("dl"));
      for (const [name, content] of Object.entries(value)) list.append(text("dt", name), text("dd", show(content)));
    } else tip.textContent = show(value);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
    const top = event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 14 : event.clientY + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }
  addEventListener("scroll", () => (tip.hidden = true), { passive: true });

  // ---- charts ----
  async function draw(element, spec, extra = {}) {
    const datasets = { ...extra };
    for (const name of spec.uses ?? []) datasets[name] = rows(name);
    const whole = { ...spec.chart, datasets: { ...(spec.chart.datasets ?? {}), ...datasets } };
    views.get(element)?.finalize();
    element.textContent = "";
    const result = await vegaEmbed(element, whole, {
      actions: false, ast: true, renderer: "svg", defaultStyle: false, mode: "vega-lite", tooltip,
      config: page.config, downloadFileName: "figure",
    });
    views.set(element, result.view);
    element.querySelector("svg")?.setAttribute("aria-hidden", "true");
    element.dataset.drawn = "yes";
    return result.view;
  }

  // A legend takes its rows from the width: another width, another height of the whole.
  let settling;
  addEventListener("resize", () => {
    clearTimeout(settling);
    settling = setTimeout(() => views.forEach((view) => view.resize().runAsync().catch(() => undefined)), 120);
  });

  function failed(element, error) {
    element.textContent = "";
    element.append(text("p", `This chart could not be drawn (${error.message}). Its numbers are below.`, { class: "trouble" }));
    console.error(error);
  }

  // ---- downloads ----
  function save(name, content, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async function asSvg(view) {
    const svg = await view.toSVG();
    return svg.replace(/var\(--([a-z]+)\)/g, (all, role) => roles[role] ?? all);
  }

  const quote = (value) => {
    if (value === null || value === undefined) return "";
    let cell = Array.isArray(value) ? value.join(" ") : String(value);
    // A spreadsheet must not take a name from a model for a formula.
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(cell)) cell = `'${cell}`;
    return /[",\n\r]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
  };
  function asCsv(name) {
    const names = Object.keys(store[name]);
    const lines = rows(name).map((row) => names.map((n) => quote(row[n])).join(","));
    return [names.map(quote).join(","), ...lines].join("\r\n") + "\r\n";
  }

  function asTable(name, caption) {
    const table = document.createElement("table");
    table.append(text("caption", caption));
    const names = Object.keys(store[name]);
    const numeric = new Set(names.filter((n) => store[name][n].every((v) => v === null || typeof v === "number")));
    const digits = page.digits[name] ?? {};
    const kind = (n) => (numeric.has(n) ? { class: "n" } : {});
    const head = table.createTHead().insertRow();
    for (const n of names) head.append(text("th", words(n), { scope: "col", ...kind(n) }));
    const body = table.createTBody();
    for (const row of rows(name)) {
      const line = body.insertRow();
      for (const n of names) line.append(text("td", show(row[n], digits[n]), kind(n)));
    }
    return table;
  }

  // ---- one figure ----
  async function figure(spec, index) {
    const root = document.getElementById(`figure-${index}`);
    const places = [...root.querySelectorAll(":scope > .charts .chart")];
    for (const [i, chart] of spec.charts.entries()) {
      try {
        const view = await draw(places[i], chart);
        if (spec.detail) view.addEventListener("click", (event, item) => item?.datum && pick(item.datum));
      } catch (error) {
        failed(places[i], error);
      }
    }
    const stem = spec.file;
    for (const button of root.querySelectorAll("button[data-do]")) {
      button.addEventListener("click", async () => {
        if (button.dataset.do === "svg") {
          for (const [i, place] of places.entries()) {
            const view = views.get(place);
            if (view) save(`${stem}${places.length > 1 ? `-${i + 1}` : ""}.svg`, await asSvg(view), "image/svg+xml");
          }
        } else if (button.dataset.do === "csv") save(`${stem}.csv`, asCsv(spec.table), "text/csv");
        else if (button.dataset.do === "table") {
          const box = root.querySelector(".numbers");
          if (!box.firstChild) box.append(asTable(spec.table, spec.title));
          box.hidden = !box.hidden;
          button.setAttribute("aria-expanded", String(!box.hidden));
          button.textContent = box.hidden ? "Show numbers" : "Hide numbers";
        }
      });
    }
    if (!spec.detail) return;

    // A click on a mark, the arrow keys on the chart, and the two lists all choose the same thing.
    const panel = root.querySelector(".detail");
    const { keys, table } = spec.detail;
    const all = rows(table);
    const lists = keys.map((key) => panel.querySelector(`select[data-key="${CSS.escape(key)}"]`));
    let at = 0;
    const same = (a, b) => String(a) === String(b);
    function pick(datum) {
      const found = all.findIndex((row) => keys.every((key) => key in datum && same(row[key], datum[key])));
      if (found >= 0) open(found);
    }
    async function open(number) {
      at = number;
      const row = all[number];
      for (const [i, key] of keys.entries()) {
        fill(i);
        lists[i].value = String(row[key]);
      }
      const facts = panel.querySelector(".facts");
      facts.textContent = "";
      for (const [name, value] of Object.entries(row)) {
        if (keys.includes(name) || (Array.isArray(value) && value.length && typeof value[0] === "number")) continue;
        const pair = facts.appendChild(document.createElement("div"));
        pair.append(text("dt", words(name)), text("dd", show(value)));
      }
      const arrays = Object.entries(row).filter(([, v]) => Array.isArray(v) && typeof v[0] === "number");
      const longest = Math.max(0, ...arrays.map(([, v]) => v.length));
      const chosen = Array.from({ length: longest }, (_, index) => ({ index, ...Object.fromEntries(arrays.map(([n, v]) => [n, v[index] ?? null])) }));
      const mark = [Object.fromEntries(keys.map((key) => [key, row[key]]))];
      for (const place of places) {
        const view = views.get(place);
        if (view && place.dataset.framed) view.data("picked", mark).runAsync().catch(() => undefined);
      }
      const spots = [...panel.querySelectorAll(".chart")];
      for (const [i, chart] of spec.detail.charts.entries()) {
        try {
          await draw(spots[i], chart, { chosen });
        } catch (error) {
          failed(spots[i], error);
        }
      }
      panel.dataset.open = keys.map((key) => row[key]).join(" ");
    }
    function fill(i) {
      const fits = all.filter((row) => keys.slice(0, i).every((key) => same(row[key], all[at][key])));
      const options = [...new Set(fits.map((row) => String(row[keys[i]])))];
      if (options.join("\n") === [...lists[i].options].map((o) => o.value).join("\n")) return;
      lists[i].replaceChildren(...options.map((value) => text("option", value, { value })));
    }
    for (const [i, list] of lists.entries()) {
      list.addEventListener("change", () => {
        const wanted = (row) => keys.slice(0, i + 1).every((key, k) => same(row[key], lists[k].value));
        const best = all.findIndex((row) => wanted(row) && keys.slice(i + 1).every((key, k) => same(row[key], all[at][key])));
        open(best >= 0 ? best : all.findIndex(wanted));
      });
    }
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, -1], ArrowDown: [1, 1] };
    for (const place of places.filter((p) => p.dataset.pickable)) {
      place.addEventListener("keydown", (event) => {
        const step = steps[event.key];
        if (!step || keys.length < 2) return;
        event.preventDefault();
        const [key, other] = step[0] === 0 ? [keys[0], keys[1]] : [keys[1], keys[0]];
        const line = all.map((row, n) => [row, n]).filter(([row]) => same(row[other], all[at][other]));
        const here = line.findIndex(([, n]) => n === at);
        const next = line[here + step[1]];
        if (next && next[0][key] !== undefined) open(next[1]);
      });
    }
    panel.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    await open(Math.max(0, spec.detail.first ?? 0));
  }

  async function all() {
    for (const [index, spec] of page.figures.entries()) await figure(spec, index);
    document.documentElement.dataset.ready = "yes";
  }
  all();
})();
