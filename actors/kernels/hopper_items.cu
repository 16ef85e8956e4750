// Who computes what: the items of a launch, from the table of hopper_tiles.py. Part of hopper.cu.

constexpr int ROWS = 64 * GROUPS;  // queries of a tile

// A tile is 64 queries for each computing group. A strip is 64 queries whose keys the groups share
// out. Tiles that would leave most processors idle in a last round are cut into strips.
struct Plan {
    int heads, tiles, cut, items;  // tiles that stay whole; strips cut from tiles; all items
    DEVICE Plan(const int4* table, int heads) : heads(heads) {
        int4 counts = __ldg(table);
        int all = counts.x * heads, left = all % gridDim.x;
        if (3 * left > 2 * gridDim.x) left = 0;
        tiles = all - left;
        cut = left * GROUPS;
        items = tiles + cut + counts.y * heads;
    }
};

// One item: 64 or ROWS queries from `row` on, of one head of the segment [start, end).
struct Work {
    int start, end, row, head;
    bool strip;
    DEVICE Work(const int4* table, const Plan& plan, int item) {
        strip = item >= plan.tiles;
        bool cut = strip && item < plan.tiles + plan.cut;
        int at = !strip ? item
                 : cut  ? plan.tiles + (item - plan.tiles) / GROUPS
                        : item - plan.cut + plan.cut / GROUPS;
        int4 entry = __ldg(table + 1 + at / plan.heads);
        int within = at - entry.z * plan.heads, index = within % entry.w;
        start = entry.x;
        end = entry.y;
        head = within / entry.w;
        row = start + index * ROWS;
        if (cut) row += (item - plan.tiles) % GROUPS * 64;
        // The strips of the table are the last ones of their segment.
        else if (strip) row = start + ((end - start + 63) / 64 - entry.w + index) * 64;
    }
    DEVICE bool empty() const { return row >= end; }  // the end of a tile that was cut
    // The last block of keys, the one that may be partial, comes first.
    DEVICE int blocks() const { return (end - start + KEYS - 1) / KEYS; }
    DEVICE int last_keys() const { return (end - start - 1) % KEYS + 1; }
};

// A place in the ring of stages and the parity of the round.
struct Place {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
