// Snapshots of the cells of a context.
#include "groups.h"

bool plk::take_picture(plk_context &context, Picture &out) {
    if (!(plk::cells::bits & PLK_CAP_CELLS)) {
        return false;
    }
    out.words = (context.n_seq_max + 63) / 64;
    for (int32_t cache = 0; cache < plk::cells::count(context.ctx); ++cache) {
        plk_cells_info info{};
        if (plk::cells::info(context.ctx, cache, info) != PLK_OK) {
            return false;
        }
        const size_t start = out.pos.size();
        std::vector<int32_t> shift(info.n_cells);
        out.pos.resize(start + info.n_cells, -1);
        out.seqs.resize((start + info.n_cells) * out.words, 0);
        if (plk::cells::read(context.ctx, cache, info.n_cells, out.pos.data() + start, shift.data(),
                             out.seqs.data() + start * out.words,
                             static_cast<int32_t>(out.words)) < 0) {
            return false;
        }
    }
    return true;
}

bool plk::take_positions(plk_context &context, int32_t seq, std::vector<int32_t> &out) {
    Picture picture;
    if (!take_picture(context, picture)) {
        return false;
    }
    for (size_t i = 0; i < picture.pos.size(); ++i) {
        const uint64_t word = picture.seqs[i * picture.words + static_cast<size_t>(seq) / 64];
        if (picture.pos[i] >= 0 && (word >> (seq % 64) & 1) != 0) {
            out.push_back(picture.pos[i]);
        }
    }
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return true;
}

bool plk::strays(plk_context &context) {
    Picture picture;
    return take_picture(context, picture) &&
           std::any_of(picture.pos.begin(), picture.pos.end(),
                       [](int32_t pos) { return pos >= far_away; });
}
