"use strict";
(() => {
  const id = (name) => document.getElementById(name);
  const theme = id("theme");
  const isDark = () => {
    const set = document.documentElement.dataset.theme;
    return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; name(); });
  name();

  const table = id("results");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const labels = heads.map((head) => head.textContent);
  const choice = id("sort");
  let sorted = { column: 0, down: false };

  // A missing value stays last whichever way the column is sorted.
  const sort = (column, down) => {
    const numeric = heads[column].classList.contains("n");
    const key = (row) => row.cells[column].dataset.v ?? "";
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const way = numeric ? Number(x) - Number(y) : x < y ? -1 : x > y ? 1 : 0;
      return down ? -way : way;
    };
    body.append(...[...rows].sort(order));
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    choice.value = `${column} ${down}`;
    sorted = { column, down };
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = labels[column];
    button.addEventListener("click", () => sort(column, sorted.column === column && !sorted.down));
    head.replaceChildren(button);
    for (const down of [false, true]) {
      const words = head.classList.contains("n") ? ["smallest first", "largest first"] : ["first to last", "last to first"];
      choice.add(new Option(`${labels[column]}, ${words[Number(down)]}`, `${column} ${down}`));
    }
  });
  choice.addEventListener("change", () => {
    const [column, down] = choice.value.split(" ");
    sort(Number(column), down === "true");
  });

  const inputs = ["find", "gpu", "only"].map(id).filter(Boolean);
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const words = id("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [gpu, only] = [id("gpu")?.value ?? "", id("only").value];
    let shown = 0;
    rows.forEach((row, index) => {
      const fits = words.every((word) => texts[index].includes(word)) && (!gpu || row.dataset.gpu === gpu)
        && (!only || row.dataset.flags.split(" ").includes(only));
      row.hidden = !fits;
      shown += fits;
    });
    id("count").textContent = `${shown} of ${rows.length} rows`;
  };
  inputs.forEach((input) => input.addEventListener("input", filter));

  // A link or a mark leads to its row, even to one that is filtered away.
  const reveal = (target) => {
    if (target?.hidden) {
      inputs.forEach((input) => { input.value = ""; });
      filter();
    }
  };
  document.addEventListener("click", (event) => {
    const mark = event.target.closest("[data-row]");
    const link = event.target.closest("a[href^='#']");
    if (link) reveal(id(link.hash.slice(1)));
    if (mark) { reveal(id(mark.dataset.row)); location.hash = mark.dataset.row; }
  });
  const light = (row, on) => {
    if (row) document.querySelectorAll(`[data-row="${row.id}"]`).forEach((mark) => mark.classList.toggle("on", on));
  };
  body.addEventListener("mouseover", (event) => light(event.target.closest("tr"), true));
  body.addEventListener("mouseout", (event) => light(event.target.closest("tr"), false));

  id("tools").hidden = false;
  sort(0, false);
  filter();
})();
