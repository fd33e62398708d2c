// Embeddings of n-grams: rows of a table in parts, by hashes of a sequence's last tokens.
#include "sequences.h"
#include "weights.h"

// Where a part of the table begins: in units of WEIGHT_UNIT bytes from the start of the buffers that it is in.
CONSTANT uint WEIGHT_UNIT = 256;
struct TablePart {
    // Rows of all parts before, 64 bits.
    uint rows_before[2];
    uint planes[3];
};

struct NGramConstants {
    Format table;
    // Tokens of the longest n-grams, heads, and the token that ends what n-grams reach.
    uint tokens, heads, end;
    // Parts of the table, which one more follows that says where the last one ends.
    uint parts;
};

// 64 bits of `numbers`.
DEVICE ulong number_at(GPTR(const uint) numbers, uint index) {
    return (ulong)numbers[2 * index] | (ulong)numbers[2 * index + 1] << 32;
}

// The token `before` tokens before row `own` of a sequence's rows, plus one; 0 if there is none. The state holds the tokens
// before the batch in this form, newest first.
DEVICE uint token_before(GPTR(const uint) tokens,
                         GPTR(const float) state, const Sequence s, uint held, uint own, uint before) {
    if (before <= own) return tokens[s.first_row + own - before] + 1;
    return s.start == 0 ? 0 : (uint)(float)state[(ulong)s.read * held + before - own - 1];
}

// The rows that the last tokens choose → out (rows, heads · cols). `numbers` (64 bits each): a multiplier for each of the tokens, the rows
// of each head, and the rows of the heads before it. Rows of other parts than are given are left alone. Grid: (heads, rows).
KERNEL(ngram_embed, NGramConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const uint, numbers), (const TablePart, parts), (const uint, tokens), (const float, state),
       (const Sequence, sequences), (const uint, owners), (float, out)) {
    const uint head = ctx.group_x(), row = ctx.group_y(), held = c.tokens - 1;
    const Sequence s = sequences[owners[row]];
    const uint reach = head / (c.heads / held) + 1;
    ulong hash = tokens[row] * number_at(numbers, 0);
    bool ended = false;
    for (uint before = 1; before <= reach; ++before) {
        const uint token = token_before(tokens, state, s, held, row - s.first_row, before);
        ended = ended || token == 0 || token - 1 == c.end;
        hash ^= (ended ? c.end : token - 1) * number_at(numbers, before);
    }
    const ulong index = number_at(numbers, c.tokens + c.heads + head) + hash % number_at(numbers, c.tokens + head);
    // The last part that begins at or before the row.
    uint part = 0, end = c.parts;
    while (part < end) {
        const uint middle = (part + end + 1) / 2;
        const ulong first = parts[middle].rows_before[0] | (ulong)parts[middle].rows_before[1] << 32;
        if (first <= index) part = middle;
        else end = middle - 1;
    }
    const TablePart own = parts[part];
    const ulong first = own.rows_before[0] | (ulong)own.rows_before[1] << 32;
    if (part == c.parts || index < first) return;
    const Row from = row_of(plane0 + (ulong)own.planes[0] * WEIGHT_UNIT, plane1 + (ulong)own.planes[1] * WEIGHT_UNIT,
                            plane2 + (ulong)own.planes[2] * WEIGHT_UNIT, c.table, (uint)(index - first));
    const ulong to = ((ulong)row * c.heads + head) * c.table.cols;
    for (uint i = ctx.thread(); 8 * i < c.table.cols; i += ctx.threads()) {
        const Float8 w = load8<ANY>(c.table, from, i);
        for (uint j = 0; j < 8 && 8 * i + j < c.table.cols; ++j) out[to + 8 * i + j] = w.v[j];
    }
}

struct NGramStateConstants {
    uint sequences, held;
};

// The state after. A thread does a sequence.
KERNEL(ngram_state, NGramStateConstants, (const uint, tokens), (const Sequence, sequences), (float, state)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.sequences) return;
    const Sequence s = sequences[i];
    // Descending, because the slots may be the same: what is read lies below.
    for (uint before = c.held; before > 0; --before) {
        state[(ulong)s.write * c.held + before - 1] =
            (float)token_before(tokens, state, s, c.held, s.rows - 1, before - 1);
    }
}
