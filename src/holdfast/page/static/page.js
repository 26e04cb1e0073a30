// Refreshes a run, shows ages, sorts tables and draws large heat maps. Every page works without this file.
"use strict";

const ages = () => {
  for (const time of document.querySelectorAll("time[data-age]")) {
    const seconds = Math.max(Date.now() / 1000 - Number(time.dataset.age), 0);
    const unit = [["d", 86400], ["h", 3600], ["min", 60]].find(([, length]) => seconds >= 2 * length) || ["s", 1];
    time.textContent = `${Math.floor(seconds / unit[1])} ${unit[0]}`;
  }
};

const sortable = () => {
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    [...table.tHead.rows[0].cells].forEach((head, at) => {
      if (head.querySelector("a")) return;
      head.addEventListener("click", () => {
        const falling = head.getAttribute("aria-sort") !== "descending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const value = (row) => {
          const cell = row.cells[at];
          const number = Number((cell.dataset.value ?? cell.textContent).replace("inf", "Infinity"));
          if (!Number.isNaN(number)) return number;
          return head.classList.contains("n") ? -Infinity : cell.textContent;
        };
        const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (falling ? -1 : 1);
        const rows = [...table.tBodies[0].rows].sort((a, b) => order(value(a), value(b)));
        table.tBodies[0].append(...rows);
      });
    });
  }
};

const draw = async (canvas) => {
  const { work } = await (await fetch(canvas.dataset.source)).json();
  const ranks = [...work.ranks].sort((a, b) => (a.host < b.host ? -1 : a.host > b.host ? 1 : a.rank - b.rank));
  const phases = [...new Set(ranks.flatMap((rank) => Object.keys(rank.phases)))].slice(0, 64);
  const longest = Math.max(1e-9, ...phases.map((phase) => ranks.reduce((most, rank) => Math.max(most, rank.phases[phase] || 0), 0)));
  const columns = Math.min(ranks.length, 1024);
  const perRow = Math.ceil(ranks.length / columns);
  canvas.width = columns;
  canvas.height = phases.length * (perRow + 1);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const [red, green, blue] = getComputedStyle(document.documentElement).getPropertyValue("--heat").split(",").map(Number);
  const at = (x, y) => ({ rank: ranks[(y % (perRow + 1)) * columns + x], phase: phases[Math.floor(y / (perRow + 1))], gap: y % (perRow + 1) === perRow });
  for (let y = 0; y < canvas.height; y++) {
    for (let x = 0; x < canvas.width; x++) {
      const { rank, phase, gap } = at(x, y);
      if (!rank || gap) continue;
      image.data.set([red, green, blue, 20 + 235 * Math.min((rank.phases[phase] || 0) / longest, 1)], 4 * (y * canvas.width + x));
    }
  }
  context.putImageData(image, 0, 0);
  canvas.dataset.drawn = String(ranks.length);
  const line = canvas.parentElement.querySelector(".heat-at");
  line.textContent = `${ranks.length} ranks by host; bands from top to bottom: ${phases.join(", ")}`;
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    return at(Math.floor(((event.clientX - box.left) * canvas.width) / box.width), Math.floor(((event.clientY - box.top) * canvas.height) / box.height));
  };
  canvas.addEventListener("mousemove", (event) => {
    const { rank, phase } = under(event);
    line.textContent = rank ? `rank ${rank.rank} on ${rank.host}, ${phase}: ${(rank.phases[phase] || 0).toFixed(3)} s` : "";
  });
  canvas.addEventListener("click", (event) => {
    const { rank } = under(event);
    if (rank) location.href = `${canvas.dataset.rank.replace("RANK", rank.rank)}#timeline`;
  });
};

let tag = "";
const poll = async () => {
  const main = document.querySelector("main[data-poll]");
  if (!main) return;
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store", signal: AbortSignal.timeout(30000) });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") || "";
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        if (fresh) main.replaceChildren(...fresh.childNodes);
        ages();
      } else if (answer.status === 304) {
        const now = new Date(answer.headers.get("Date")).toISOString();
        const shown = main.querySelector("[data-as-of]");
        if (shown) shown.textContent = `${now.slice(0, 10)} ${now.slice(11, 19)} UTC`;
      }
      main.classList.toggle("bad-poll", answer.status >= 400);
    } catch {
      main.classList.add("bad-poll");
    }
  }
  setTimeout(poll, Number(main.dataset.poll) * 1000);
};

ages();
sortable();
setInterval(ages, 1000);
for (const canvas of document.querySelectorAll("canvas[data-source]")) draw(canvas);
const polled = document.querySelector("main[data-poll]");
if (polled) setTimeout(poll, Number(polled.dataset.poll) * 1000);
