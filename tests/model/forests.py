"""Random forests of token runs, and what their rows are when each is computed alone."""

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from verl_memopt.model.packing import pack_forest


@dataclass(frozen=True)
class Forest:
    """Sizes and parents of nodes, and the places that each row learns."""

    sizes: tuple[int, ...]
    parents: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def tokens(self):
        """Token ids from 1 to 200, of which siblings may have equal ones. 0 pads: its embedding is 0 and learns nothing."""
        return (torch.arange(sum(self.sizes)) * 37 + 11) % 200 + 1

    @property
    def places(self):
        return [place for row in self.rows for place in row]

    def path(self, place):
        """Gives the places from the root of a tree to a place, with it."""
        starts = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        node = max(node for node in range(len(self.sizes)) if starts[node] <= place)
        own, node = [*range(starts[node], place + 1)], self.parents[node]
        while node >= 0:
            own, node = [*range(starts[node], starts[node + 1]), *own], self.parents[node]
        return own

    def computed(self):
        """Gives the places that are a predictor of a learned place, or before it on its path."""
        return {place for learned in self.places for place in self.path(learned)[:-1]}

    def pack(self):
        sizes, parents, places = (torch.tensor(some, dtype=torch.int64) for some in (self.sizes, self.parents, self.places))
        return pack_forest(self.tokens, sizes, parents, places, [len(row) for row in self.rows])


@st.composite
def forests(draw, nodes=14, size=9, rows=6):
    """Draws forests: single tokens, empty rows, rows that end at inner nodes, rows of several branches, and equal rows."""
    count = draw(st.integers(1, nodes))
    deep = draw(st.booleans())
    parents = [draw(st.integers(max(-1, node - 2) if deep else -1, node - 1)) for node in range(count)]
    sizes = [draw(st.integers(1, size)) for _ in range(count)]
    starts = [sum(sizes[:node]) for node in range(count)]
    runs = st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, size), st.integers(0, size)), max_size=4)
    learned = []
    for _ in range(draw(st.integers(1, rows))):
        row = []
        for node, first, length in draw(runs):
            # The first token of a root has no predictor.
            low = starts[node] + min(max(first, 1) if parents[node] < 0 else first, sizes[node])
            row += range(low, min(low + length, starts[node] + sizes[node]))
        learned.append(tuple(dict.fromkeys(row)))
        if draw(st.integers(0, 4)) == 0:
            learned.append(learned[-1])
    return Forest(tuple(sizes), tuple(parents), tuple(learned))


FORESTS = forests()


def agent(turns=16, answers=4, context=8, answer=8):
    """Gives a forest in which each turn has several answers and one of them goes on."""
    sizes, parents, rows, above = [context], [-1], [], 0
    for _ in range(turns):
        for number in range(answers):
            sizes += [answer]
            parents += [above]
            rows.append(tuple(range(sum(sizes[:-1]), sum(sizes))))
            if number == 0:
                following = len(sizes) - 1
        sizes += [context]
        parents += [following]
        above = len(sizes) - 1
    return Forest(tuple(sizes), tuple(parents), tuple(rows))


def conversations(prompt, *turns):
    """Gives conversations over one prompt. Each is the sizes of its answers and of what follows them: (answer, tool), ..."""
    sizes, parents, rows = [prompt], [-1], []
    for own in turns:
        place, row = sum(sizes), []
        for answer, tool in own:
            row += range(place, place + answer)
            place += answer + tool
        rows.append(tuple(row))
        sizes.append(place - sum(sizes))
        parents.append(0)
    return Forest(tuple(sizes), tuple(parents), tuple(rows))


def random_forest(seed):
    """Gives trees of at most 6 levels, and rows that sampled tokens of one or two paths, some of them as other rows did."""
    draw = random.Random(seed)
    sizes, parents, depth = [], [], []
    for node in range(draw.randint(8, 24)):
        above = [other for other in range(node) if depth[other] < 6]
        parent = -1 if node == 0 or draw.random() < 0.08 else draw.choice(above)
        sizes.append(draw.randint(1, 9))
        parents.append(parent)
        depth.append(1 if parent < 0 else depth[parent] + 1)
    empty = Forest(tuple(sizes), tuple(parents), ())
    rows = []
    for _ in range(draw.randint(4, 10)):
        row = []
        for _ in range(draw.choice((1, 1, 2))):
            # Runs of sampled tokens and runs that a user or a tool wrote.
            path, is_sampled = empty.path(draw.randrange(sum(sizes)))[1:], False
            for place in path:
                is_sampled ^= draw.random() < 0.4
                row += [place] * is_sampled
        rows.append(tuple(dict.fromkeys(row)))
        if draw.random() < 0.15:
            rows.append(rows[-1])
    return Forest(tuple(sizes), tuple(parents), tuple(rows)) if any(rows) else random_forest(seed + 10_000)
