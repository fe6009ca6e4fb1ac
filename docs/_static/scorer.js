// Names of the package itself come first, as sdeinfer.observe; guides before pages that match as well, notebooks after them; names for builders last.
var Scorer = {
  score: ([docname, title, , , score, , kind]) => {
    if (kind === "object" && title.split(".").length === 2) return score + 6;
    if (docname.startsWith("api/packages/")) return score - 15;
    if (docname.startsWith("notebooks/")) return score - 3;
    return docname.startsWith("guides/") ? score + 2 : score;
  },
  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
