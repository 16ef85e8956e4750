// Who computes what: the items of a launch, from the table of hopper_tiles.py. Part of hopper.cu.

constexpr int EVEN_STRIPS = 8;  // more are no faster so than as tiles

// The entries of the table, once for each head, are the items that the blocks take in turn. What
// would leave processors idle in a last round is cut: each of its entries into as many parts as
// there are processors for it. A segment that is alone, and too long for one round, is first cut
// evenly for all processors, if that leaves no group alone with a strip.
struct Plan {
    int heads, whole, share, items;  // items that stay whole, parts of each other one, all items
    int even;                        // what Work reads of an entry instead of its last number, or 0
    DEVICE Plan(const int4* table, int heads) : heads(heads) {
        int4 counts = __ldg(table);
        int parts = max(gridDim.x / heads, 1), strips = (counts.y + parts - 1) / parts;
        even = strips % GROUPS == 1 || strips > EVEN_STRIPS ? 0 : strips << 16 | parts;
        if (strips == 0) even = 0;
        int all = (even ? parts : counts.x) * heads, left = all % gridDim.x;
        whole = all - left;
        share = gridDim.x / max(left, 1);
        items = whole + left * share;
    }
    DEVICE int at(int item) const {
        return item < whole ? item : whole + (item - whole) / share;
    }
    DEVICE int4 entry(const int4* table, int item) const {
        int4 found = __ldg(table + 1 + (item < items && !even ? at(item) / heads : 0));
        if (even) found.w = even;
        return found;
    }
};

// One item: so many strips of 64 queries from `row` on, of one head of the segment [start, end).
// `shared`: one strip whose keys the groups share out, otherwise each group takes strips.
struct Work {
    int start, end, row, head, strips;
    bool shared;
    DEVICE Work(const Plan& plan, int item, const int4& entry) {
        start = entry.x;
        end = entry.y;
        int tiles = entry.w & 0xffff, most = entry.w >> 16;
        int within = plan.at(item) - entry.z * plan.heads;
        head = within / tiles;
        row = start + within % tiles * most * 64;
        strips = max(min(most, (end - row + 63) / 64), 0);
        shared = false;
        if (item >= plan.whole) {
            int part = (item - plan.whole) % plan.share, first = strips * part / plan.share;
            strips = strips * (part + 1) / plan.share - first;
            row += first * 64;
            shared = strips == 1 && !kept();
        }
    }
    // The first strip of a group; the others follow in steps of GROUPS.
    DEVICE int first(int group, int turn) const {
        return shared ? 0 : (group + GROUPS - turn) % GROUPS;
    }
    // Which group takes the first strip of the item behind this one: so each has as many.
    DEVICE int next(int turn) const { return shared ? turn : (turn + strips) % GROUPS; }
    // Whether the ring holds all keys at once, for all strips.
    DEVICE bool kept() const { return blocks() <= STAGES; }
    // The last block of keys, the one that may be partial, comes first.
    DEVICE int blocks() const { return (end - start + KEYS - 1) / KEYS; }
    DEVICE int last_keys() const { return (end - start - 1) % KEYS + 1; }
};
