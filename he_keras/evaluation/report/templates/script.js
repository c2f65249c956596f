"use strict";
// Headers of sortable tables become buttons, and folded parts open for printing. Without this
// script the page says the same, in the order in which the rows were written.
(() => {
  const announcement = document.getElementById("announcement");

  // What a row, or a group of rows, is sorted by: the cell of its first row in that column.
  const sortKey = (item, column, kind) => {
    const row = item.matches("tr") ? item : item.rows[0];
    const cell = row.cells[column];
    if (kind === "text") return cell.textContent.trim();
    return "value" in cell.dataset ? Number(cell.dataset.value) : null;
  };

  // What was not measured comes last in either direction; equal keys keep their order.
  const compare = (a, b, sign) => {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "string") return sign * a.localeCompare(b, "en", { numeric: true });
    return sign * (a - b);
  };

  const sortBy = (table, header) => {
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    const column = header.cellIndex;
    const kind = header.dataset.sorts;
    const groups = [...table.tBodies];
    const parent = groups.length > 1 ? table : groups[0];
    const items = groups.length > 1 ? groups : [...groups[0].rows];
    items
      .map((item) => ({ item, key: sortKey(item, column, kind) }))
      .sort((a, b) => compare(a.key, b.key, ascending ? 1 : -1))
      .forEach(({ item }) => parent.append(item));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const direction = ascending ? "ascending" : "descending";
    announcement.textContent = `Sorted by ${header.textContent.trim()}, ${direction}.`;
  };

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    if (!table.tBodies.length) continue;
    for (const header of table.querySelectorAll("thead th[data-sorts]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      button.addEventListener("click", () => sortBy(table, header));
      header.append(button);
    }
  }

  const opened = [];
  window.addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      opened.push(part);
    }
  });
  window.addEventListener("afterprint", () => {
    for (const part of opened.splice(0)) part.open = false;
  });
})();
