// The order of search results: the name that was searched, guides, similar names, all other pages.
var Scorer = {
  objNameMatch: 31, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score, , kind]) => {
    if (kind === "object") return /nd\.(compat|estimator|graph|interop|models\.)/.test(page) ? score - 9 : score;
    return /^docs\/(?!reference|architecture|decisions|what-was-tried|performance)/.test(page) ? score + 10 : score;
  },
};
