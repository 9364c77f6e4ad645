// What sphinx adds up for a page is the same for a word in its title and in any of its headings. A page that is about
// the query comes first: its title has the words, or one of its headings has them all; and a guide before a reference.

const _wordsOf = (text) => {
  const stemmer = new Stemmer();
  return text.toLowerCase().split(/[^a-z0-9]+/).filter((word) => word && !stopwords.has(word)).map((word) => stemmer.stemWord(word));
};

const _shareOf = (query, text) => {
  const words = _wordsOf(text);
  return query.filter((word) => words.some((each) => each.startsWith(word))).length / query.length;
};

const _headingsOf = (docname) => {
  const file = Search._index.docnames.indexOf(docname);
  return Object.entries(Search._index.alltitles)
    .filter(([, places]) => places.some(([each]) => each === file))
    .map(([heading]) => heading);
};

// A page has to have all words of a query. Where none has, those that have most of them are shown.
document.addEventListener("DOMContentLoaded", () => {
  const search = Search._performSearch;
  Search._performSearch = (query, words, ...rest) => {
    const found = search(query, words, ...rest);
    if (found.length || words.size < 2) return found;
    const pages = new Map();
    for (const word of words) {
      for (const result of search(word, new Set([word]), ...rest)) {
        const page = pages.get(result[0]) ?? { words: new Set(), result };
        page.words.add(word);
        pages.set(result[0], page);
      }
    }
    const order = [...pages.values()].sort((a, b) => a.words.size - b.words.size || a.result[4] - b.result[4]);
    return order.map((page) => page.result);  // The last one is shown first.
  };
});

var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) => {
    const query = _wordsOf(new URLSearchParams(window.location.search).get("q") ?? "");
    if (kind === "object" || !query.length) return score;
    const page = Search._index.titles[Search._index.docnames.indexOf(docname)];
    const headings = Math.max(0, ..._headingsOf(docname).map((heading) => _shareOf(query, heading)));
    const brief = 1 / (1 + _wordsOf(page).length);  // Of two titles with the words, the one that has fewer others.
    const guide = /^(howto|features|engines)\/(?!index)/.test(docname) ? 3 : 0;
    return score + 20 * _shareOf(query, page) * (1 + brief) + 10 * headings + guide;
  },

  // The defaults of sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
