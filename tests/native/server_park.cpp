// Unit tests of server-park.h: requests to park and to resume, seats, entries of a batch, the limit and the metrics.

#include "check.h"

#include "server-park.h"

#include <functional>
#include <map>

using server_park::group;

static group active(uint64_t order, int64_t cells, int64_t next = 1) {
    group g;
    g.order = order;
    g.cells = cells;
    g.next  = next;
    return g;
}

static group parked(uint64_t order, int64_t cells, uint64_t since) {
    group g  = active(order, cells);
    g.parked = true;
    g.since  = since;
    return g;
}

static void victims() {
    // the last started request
    CHECK(server_park::victim({ active(1, 10), active(3, 10), active(2, 10) }) == 1);
    // neither the only active request, nor a parked one
    CHECK(server_park::victim({}) == -1);
    CHECK(server_park::victim({ active(1, 10) }) == -1);
    CHECK(server_park::victim({ active(1, 10), parked(2, 10, 0) }) == -1);
    CHECK(server_park::victim({ active(1, 10), active(2, 10), parked(3, 10, 0) }) == 1);
    // a guarded request only if all other active ones are guarded
    std::vector<group> groups = { active(1, 10), active(2, 10), active(3, 10) };
    groups[2].guarded = true;
    CHECK(server_park::victim(groups) == 1);
    groups[0].guarded = groups[1].guarded = true;
    CHECK(server_park::victim(groups) == 2);
    groups = { active(2, 10), active(1, 10) };
    groups[0].guarded = true;
    CHECK(server_park::victim(groups) == 1);
    // a request that cannot be parked is active, but never a victim
    groups = { active(1, 10), active(2, 10) };
    groups[1].parkable = false;
    CHECK(server_park::victim(groups) == 0 && server_park::last_started(groups) == 1);
    groups[0].parkable = false;
    CHECK(server_park::victim(groups) == -1);
    CHECK(server_park::last_started({ parked(2, 10, 0) }) == -1);
    CHECK(server_park::last_started({ active(1, 10), parked(2, 10, 0) }) == 0);
}

static void turns() {
    CHECK(server_park::turn(0) == 64 && server_park::turn(64) == 64 && server_park::turn(65) == 65);

    // no parked request
    CHECK(server_park::next_change({ active(1, 10) }, 100, 0).resume == -1);
    // resumes only if its cells and the next batch fit
    CHECK(server_park::next_change({ active(1, 49), parked(2, 49, 0) }, 100, 1).resume == 1);
    CHECK(server_park::next_change({ active(1, 50), parked(2, 49, 0) }, 100, 1).resume == -1);
    CHECK(server_park::next_change({ active(1, 49, 2), parked(2, 49, 0) }, 100, 1).resume == -1);
    // cells that are copied before they are shared count as well
    std::vector<group> groups = { active(1, 40), parked(2, 40, 0) };
    groups[1].extra = 19;
    CHECK(server_park::next_change(groups, 100, 1).resume == 1);
    groups[1].extra = 20;
    CHECK(server_park::next_change(groups, 100, 1).resume == -1);
    // only the request that waits longest, even if another one would fit
    CHECK(server_park::next_change({ active(1, 40), parked(2, 30, 5), parked(3, 30, 4) }, 100, 5).resume == 2);
    CHECK(server_park::next_change({ active(1, 40), parked(3, 30, 4), parked(2, 30, 4) }, 100, 5).resume == 2);
    CHECK(server_park::next_change({ active(1, 40), parked(2, 10, 5), parked(3, 80, 4) }, 100, 5).resume == -1);
    // without an active request it resumes even if it does not fit, and without waiting for its retry
    groups = { parked(1, 200, 0), parked(2, 10, 1) };
    groups[0].retry = 100;
    CHECK(server_park::next_change(groups, 100, 1).resume == 0);
    groups.push_back(active(3, 1));
    groups[0].cells = 10;
    CHECK(server_park::next_change(groups, 100, 99).resume == -1 && server_park::next_change(groups, 100, 100).resume == 0);

    // after a turn it replaces the last started requests
    groups = { active(1, 30), active(3, 30), active(2, 30), parked(4, 40, 100) };
    CHECK(server_park::next_change(groups, 100, 163).resume == -1);
    server_park::change c = server_park::next_change(groups, 100, 164);
    CHECK(c.resume == 3 && c.park == std::vector<int>({ 1, 2 }));
    groups[3].cells = 30;
    c = server_park::next_change(groups, 100, 164);
    CHECK(c.resume == 3 && c.park == std::vector<int>({ 1 }));
    // a turn is longer for a request with more cells
    groups[3].cells = 90;
    CHECK(server_park::next_change(groups, 200, 189).resume == 3);
    CHECK(server_park::next_change(groups, 100, 189).resume == -1);
    // guarded requests and those that cannot be parked are not replaced; none is parked if that does not free enough
    groups[3].cells = 40;
    groups[1].guarded = true;
    c = server_park::next_change(groups, 100, 200);
    CHECK(c.resume == 3 && c.park == std::vector<int>({ 2, 0 }));
    groups[0].parkable = false;
    c = server_park::next_change(groups, 100, 200);
    CHECK(c.resume == -1 && c.park.empty());
}

static void seats() {
    server_park::seat seat;
    seat.start(7);
    seat.evaluated = 20;
    seat.retry     = 3;
    seat.park(std::vector<uint8_t>(5), 100, 40);
    CHECK(seat.order == 7 && seat.data.size() == 5 && seat.n_tokens == 100 && seat.since == 40 && seat.retry == 0 && seat.n_parks == 1);
    seat.resume();
    CHECK(seat.data.capacity() == 0 && seat.n_tokens == 0 && seat.guard == 120 && seat.evaluated == 20 && seat.resumed == 20);
    seat.park(std::vector<uint8_t>(5), 10, 50);
    seat.resume();
    CHECK(seat.guard == 84 && seat.n_parks == 2);
    seat.start(8);
    CHECK(seat.order == 8 && seat.guard == 0 && seat.n_parks == 0);

    CHECK(server_park::cells_of_family(300, 80, 3) == 140);
    CHECK(server_park::cells_of_family(300, 80, 1) == 300 && server_park::cells_of_family(300, 80, 0) == 300);
    std::vector<group> groups = { active(1, 30), parked(2, 40, 0), active(3, 5) };
    CHECK(server_park::cells_held(groups) == 35);
}

struct entry {
    int id_slot;
    int token;
};

struct batch_of_entries {
    std::vector<entry> tokens;
};

struct slot_with_index {
    int32_t i_batch;
};

static void entries() {
    batch_of_entries batch = { { { 0, 1 }, { 1, 2 }, { 0, 3 }, { 1, 4 }, { 2, 5 }, { 1, 6 }, { 3, 7 } } };

    // the index of slot 0 is before the removed entries, that of slot 1 is removed, those of slots 2 and 3 change
    std::vector<slot_with_index> slots = { { 2 }, { 5 }, { 4 }, { 6 }, { -1 } };
    CHECK(server_park::remove_entries(batch, slots, 1, 3) == 2);
    CHECK(batch.tokens.size() == 5);
    const int expected[] = { 1, 2, 3, 5, 7 };
    for (int i = 0; i < 5; ++i) {
        CHECK(batch.tokens[i].token == expected[i]);
    }
    CHECK(slots[0].i_batch == 2 && slots[1].i_batch == -1 && slots[2].i_batch == 3 && slots[3].i_batch == 4 && slots[4].i_batch == -1);

    // from the end: no entries; from the start: all entries of the slot
    CHECK(server_park::remove_entries(batch, slots, 0, 5) == 0 && slots[3].i_batch == 4);
    CHECK(server_park::remove_entries(batch, slots, 0, 0) == 2 && batch.tokens.size() == 3);
    CHECK(slots[0].i_batch == -1 && slots[2].i_batch == 1 && slots[3].i_batch == 2);
}

static void limits() {
    std::string error;
    CHECK(server_park::limit(nullptr, 8192, error) == (size_t) 8192*1024*1024);
    CHECK(server_park::limit(nullptr, -1, error) == SIZE_MAX && server_park::limit(nullptr, 0, error) == 0);
    CHECK(server_park::limit("0", 8192, error) == 0 && server_park::limit("3", 0, error) == 3*1024*1024);
    CHECK(server_park::limit("", 2, error) == 2*1024*1024);
    CHECK(error.empty());
    for (const char * text : { "-1", "1.5", "1 ", " 1", "many", "1GiB", "+1", "1234567890123" }) {
        error.clear();
        CHECK(server_park::limit(text, 2, error) == 2*1024*1024);
        CHECK(error.find("'" + std::string(text) + "'") != std::string::npos);
    }
}

static void metrics() {
    server_park::totals().parks   = 12345678901234;
    server_park::totals().resumes = 2;
    server_park::totals().failed  = 3;
    server_park::totals().slots   = 4;
    server_park::totals().bytes   = 5;
    const std::string text = "\n" + server_park::text();
    for (const char * line : {
            "# TYPE llamacpp:parks_total counter", "llamacpp:parks_total 12345678901234", "llamacpp:resumes_total 2",
            "llamacpp:park_failures_total 3", "# TYPE llamacpp:parked_slots gauge", "llamacpp:parked_slots 4", "llamacpp:parked_bytes 5" }) {
        CHECK(text.find("\n" + std::string(line) + "\n") != std::string::npos);
    }
}

int main(int argc, char ** argv) {
    const std::map<std::string, std::function<void()>> groups = {
        { "victims", victims }, { "turns", turns }, { "seats", seats }, { "entries", entries }, { "limits", limits }, { "metrics", metrics },
    };
    if (argc < 2) {
        for (const auto & group : groups) {
            std::printf("%s\n", group.first.c_str());
        }
        return 0;
    }
    CHECK(groups.count(argv[1]));
    groups.at(argv[1])();
    return 0;
}
