// Names of the package itself come first, as sdeinfer.observe; then pages and commands whose titles have the word itself; guides before other pages, notebooks last.
var Scorer = {
  score: ([docname, title, anchor, , score, , kind]) => {
    if (kind === "object") return title.split(".").length === 2 ? score + 6 : score;
    const query = new URLSearchParams(window.location.search).get("q") ?? "";
    if (title.toLowerCase().split(/[^\w]+/).includes(query.trim().toLowerCase())) score += 4;
    if (docname === "api/command_line" && anchor === `#sdeinfer-${query.trim()}`) score += 12;
    if (docname.startsWith("notebooks/")) return score - 3;
    return docname.startsWith("guides/") ? score + 2 : score;
  },
  // As Sphinx has them, but for words that are a part of a title's word, as like of likelihood.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 4,
  term: 5,
  partialTerm: 2,
};
