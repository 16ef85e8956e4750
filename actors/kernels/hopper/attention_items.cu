// The work items of attention.cu and attention_fp8.cu, from the table of attention.py.

constexpr int TOGETHER = GROUPS * CLUSTER;  // strips that a crew computes at a time
constexpr int EVEN_STRIPS = 8;  // with more strips, even splitting is no faster than tiles

// A crew is a cluster of CLUSTER blocks (CTAs), which compute different strips with the same keys
// and values. The work items are the table's entries, once per head; crews take them in turn. The
// items of the last round would leave SMs idle, so each of them is split into as many parts as
// there are crews for it. If there is a single segment that the ring does not hold, it is first
// split evenly over all crews, unless a part would have more than EVEN_STRIPS strips, or leave one
// warpgroup alone with a strip.
//
// The items may be spread over several launches of some rounds each. Splits, and the keys that an
// item starts with, depend on its place among all items, so the results are the same to the bit.
// They would not be if each launch had some of the heads.
struct Plan {
    int heads, crews;
    int begin, end;    // this crew's first item; the end of this launch's items
    int whole, share;  // unsplit items; parts of each split item
    int even;          // unless 0, replaces the last number of every entry
    DEVICE Plan(const int4* table, int heads, int launch, int launches)
        : heads(heads), crews(gridDim.x / CLUSTER), begin(blockIdx.x / CLUSTER) {
        int4 counts = __ldg(table);
        int parts = max(crews / heads, 1), strips = (counts.y + parts - 1) / parts;
        even = strips % TOGETHER == 1 || strips > EVEN_STRIPS ? 0 : strips << 16 | parts;
        if (strips == 0) even = 0;
        int all = (even ? parts : counts.x) * heads, left = all % crews;
        whole = all - left;
        share = crews / max(left, 1);
        end = whole + left * share;
        if (launches > 1) {
            int rounds = (end + crews - 1) / crews;
            begin += rounds * launch / launches * crews;
            end = min(end, rounds * (launch + 1) / launches * crews);
        }
    }
    DEVICE int at(int item) const {
        return item < whole ? item : whole + (item - whole) / share;
    }
    DEVICE int4 entry(const int4* table, int item) const {
        int4 found = __ldg(table + 1 + (item < end && !even ? at(item) / heads : 0));
        if (even) found.w = even;
        return found;
    }
};

// One item: `strips` strips of 64 queries from `row` on, of one head of the segment [start, end).
// `shared`: there is at most one strip per CTA, and the warpgroups of a CTA divide its keys among
// them; only if SHARES. Otherwise each warpgroup takes strips of its own.
struct Work {
    int start, end, row, head, strips;
    int second;  // see at
    bool shared;
    DEVICE Work(const Plan& plan, int item, const int4& entry) {
        start = entry.x;
        end = entry.y;
        int tiles = entry.w & 0xffff, most = entry.w >> 16;
        int within = plan.at(item) - entry.z * plan.heads;
        head = within / tiles;
        row = start + within % tiles * most * 64;
        strips = max(min(most, (end - row + 63) / 64), 0);
        second = SIDE ? 0 : item % max(blocks() - 1, 1);
        shared = false;
        if (item >= plan.whole) {
            int part = (item - plan.whole) % plan.share, first = strips * part / plan.share;
            strips = strips * (part + 1) / plan.share - first;
            row += first * 64;
            shared = SHARES && strips <= CLUSTER && !kept();
        }
    }
    // The first strip of a warpgroup; its others follow in steps of TOGETHER.
    DEVICE int first(int rank, int group, int turn) const {
        return shared ? rank : (rank * GROUPS + group + TOGETHER - turn) % TOGETHER;
    }
    // The warpgroup that takes the first strip of the next item, so that all get equally many.
    DEVICE int next(int turn) const { return shared ? turn : (turn + strips) % TOGETHER; }
    // Whether the ring holds all keys of the segment at once.
    DEVICE bool kept() const { return blocks() <= STAGES; }
    DEVICE int blocks() const { return (end - start + KEYS - 1) / KEYS; }
    // Which block of keys is the index-th to be computed. The last one, which may be partial, comes
    // first. Then items of one head start at different keys, so that they do not all read the same
    // L2 lines. Views, which need it on the consumer's side too, are faster without.
    DEVICE int at(int index) const {
        int whole = blocks() - 1, block = second + index - 1;
        return index == 0 ? whole : block < whole ? block : block - whole;
    }
    DEVICE int last_keys() const { return (end - start - 1) % KEYS + 1; }
};
