/* A libplk without llama.cpp, for tests of the binding: loading, checks, conversions, forwarding and
 * lifetimes. It fails on request, and has no cells: operations on them are logged with their
 * arguments, at level 1, and return fixed values. `simulated.py` simulates a cache.
 *
 * Vocabulary: 512 tokens; 0..255 are bytes, BOS 256, EOS 257. Scripts: decoding one of the tokens
 * below does what its name says. Logits of a token t at position p peak at (t + p + 1) % 256.
 */
#include "plk.h"

#include <arpa/inet.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef FAKE_ABI
#define FAKE_ABI PLK_ABI
#endif
#ifndef FAKE_KIND
#define FAKE_KIND 0
#endif
#ifndef FAKE_VARIANT
#define FAKE_VARIANT "fake"
#endif
#ifndef FAKE_CAPABILITIES
#define FAKE_CAPABILITIES (1 | 2 | 4 | 8 | 64 | 128)
#endif

enum { N_VOCAB = 512, BOS = 256, EOS = 257 };
enum {
    T_ABORT = 500,  /* abort() */
    T_THROW = 501,  /* an exception of llama.cpp */
    T_MINUS = 502,  /* llama_decode returns -3 */
    T_HANG = 503,   /* polls until cancelled, then returns 2 */
    T_EXIT = 504,   /* exit(7) */
    T_SEGV = 505,   /* writes to NULL */
    T_SLOW = 506,   /* sleeps 50 ms first */
    T_LOG = 507,    /* logs a warning */
    T_FLOOD = 508,  /* logs more than the ring holds */
    T_FULL = 509    /* finds no slot */
};

struct plk_model { int contexts; };
struct plk_context {
    plk_model *model;
    plk_context_params params;
    int n, outputs, reads;
    int32_t last[64], *tokens; /* last decoded position by sequence; the tokens of the last flush */
    uint8_t *state;            /* the last loaded one of any sequence */
    int64_t state_size;
    float *logits;
    float adapters, embedding[32]; /* sum of the scales, added to the logits */
    int *output_of; /* place in the batch -> row of logits, or -1 */
    volatile int cancelled;
    int64_t cancel_after, polls;
};
struct plk_adapter { int n_pairs; };
struct plk_sampler { plk_sampler_params params; int64_t taken; };

static _Thread_local char error_text[256];
static struct { int32_t level; char text[120]; } ring[64];
static int ring_first, ring_count, lowest = 2;
static int64_t lost;
static int alive; /* models and contexts: plk_model_meta("fake.alive") */

static void say(int32_t level, const char *format, ...) {
    if (level < lowest) return;
    if (ring_count == 64) { ring_first = (ring_first + 1) % 64; ring_count--; lost++; }
    int at = (ring_first + ring_count++) % 64;
    va_list args;
    va_start(args, format);
    ring[at].level = level;
    vsnprintf(ring[at].text, sizeof ring[at].text, format, args);
    va_end(args);
}
static int fail(int code, const char *text) {
    snprintf(error_text, sizeof error_text, "%s", text);
    return code;
}

uint32_t plk_abi(void) { return FAKE_ABI; }
const char *plk_variant(void) { return FAKE_VARIANT; }
uint64_t plk_capabilities(void) { return FAKE_CAPABILITIES; }
const char *plk_probes(void) { return "{\"load\": \"fake\", \"devices\": null}"; }
int32_t plk_sizeof(const char *name) {
#define SIZE(type) if (!strcmp(name, #type)) return (int32_t) sizeof(type);
    SIZE(plk_model_params) SIZE(plk_model_info) SIZE(plk_context_params) SIZE(plk_context_info)
    SIZE(plk_batch) SIZE(plk_cells_info) SIZE(plk_defrag_report) SIZE(plk_device)
    SIZE(plk_sampler_params) SIZE(plk_mapping)
#ifdef FAKE_SIZE
    if (!strcmp(name, "plk_counters")) return FAKE_SIZE;
#endif
    SIZE(plk_counters)
    return -1;
}
int plk_init(void) {
    const char *fault = getenv("FAKE_PLK_INIT");
    if (fault && !strcmp(fault, "abort")) abort();
    if (fault && !strcmp(fault, "hang")) pause();
    const char *logged = getenv("FAKE_PLK_LOG");
    if (logged) say(4, "%s", logged);
    return fault && !strcmp(fault, "fail") ? fail(PLK_EEXCEPTION, "no backend") : PLK_OK;
}
const char *plk_last_error(void) { return error_text; }
int32_t plk_log_read(int32_t *level, char *text, int32_t room) {
    if (!ring_count) return -1;
    *level = ring[ring_first].level;
    int32_t length = (int32_t) strlen(ring[ring_first].text);
    if (length > room) length = room;
    memcpy(text, ring[ring_first].text, (size_t) length);
    ring_first = (ring_first + 1) % 64;
    ring_count--;
    return length;
}
int64_t plk_log_lost(void) { return lost; }
void plk_log_level(int32_t level) { lowest = level; }
int32_t plk_device_count(void) { return 1; }
int plk_device_read(int32_t index, plk_device *out) {
    if (index) return fail(PLK_EINVAL, "no such device");
    out->kind = FAKE_KIND;
    out->memory_free = 1 << 20;
    out->memory_total = 1 << 21;
    strcpy(out->name, "FAKE");
    strcpy(out->description, "a device of no use");
    return PLK_OK;
}
int plk_rpc_serve(const char *endpoint, const char *device, uint64_t memory) {
    (void) memory;
    if (device && strcmp(device, "FAKE")) return fail(PLK_EINVAL, "no such device to serve");
    const char *port = strrchr(endpoint, ':');
    struct sockaddr_in place = {.sin_family = AF_INET};
    place.sin_port = htons((uint16_t) atoi(port + 1));
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int on = 1, all = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(all, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(all, (struct sockaddr *) &place, sizeof place) || listen(all, 4))
        return fail(PLK_EEXCEPTION, "the server could not listen");
    for (;;) {
        int one = accept(all, NULL, NULL);
        char byte;
        while (read(one, &byte, 1) == 1)
            if (byte == 'x') abort(); /* like a server that gets invalid input */
        close(one);
    }
}

int plk_model_load(const char *path, const plk_model_params *params, plk_model **out) {
    if (params->size != sizeof *params) return fail(PLK_EINVAL, "size");
    if (strstr(path, "missing")) {
        say(4, "fake: cannot open %s", path);
        return fail(PLK_EMODEL, "no such file");
    }
    say(2, "fake: loaded %s", path);
    alive++;
    *out = calloc(1, sizeof **out);
    return PLK_OK;
}
void plk_model_free(plk_model *model) {
    if (model->contexts) abort(); /* as llama.cpp does */
    alive--;
    free(model);
}
int plk_model_read(const plk_model *model, plk_model_info *out) {
    (void) model;
    uint32_t size = out->size;
    *out = (plk_model_info) { size, N_VOCAB, 4096, 32, 2, 4, 2, 16, 16, 1, BOS, EOS, -1, 10, 1, 0,
                              260096, 1040384, 0, 32 };
    return PLK_OK;
}
int32_t plk_model_meta(const plk_model *model, const char *key, char *text, int32_t room) {
    (void) model;
    if (!strcmp(key, "fake.alive")) return snprintf(text, (size_t) room, "%d", alive);
    if (!strcmp(key, "fake.env")) {
        const char *value = getenv("LLAMA_SET_ROWS");
        return value ? snprintf(text, (size_t) room, "%s", value) : -1;
    }
    if (!strcmp(key, "fake.long")) return snprintf(text, (size_t) room, "%05000d", 7);
    return strcmp(key, "general.name") ? -1 : snprintf(text, (size_t) room, "fake");
}
int32_t plk_tokenize(const plk_model *model, const char *text, int32_t length, int32_t *tokens,
                     int32_t room, int32_t add_special, int32_t parse_special) {
    (void) model, (void) parse_special;
    int32_t need = length + (add_special ? 1 : 0), n = 0;
    if (need > room) return -need;
    if (add_special) tokens[n++] = BOS;
    for (int32_t i = 0; i < length; i++) tokens[n++] = (uint8_t) text[i];
    return n;
}
int32_t plk_token_piece(const plk_model *model, int32_t token, char *piece, int32_t room,
                        int32_t special) {
    (void) model, (void) special;
    if (token < 0 || token >= N_VOCAB) return fail(PLK_EINVAL, "no such token");
    int32_t need = token < 256 ? 1 : token == 511 ? 300 : 0;
    if (need > room) return -need;
    memset(piece, token, (size_t) need);
    return need;
}
int32_t plk_token_is_eog(const plk_model *model, int32_t token) {
    (void) model;
    return token == EOS;
}

int plk_adapter_load(plk_model *model, const char *path, int32_t n_pairs, plk_adapter **out) {
    (void) model;
    if (strstr(path, "refused")) return fail(PLK_EADAPTER, "it adapts another model");
    *out = calloc(1, sizeof **out);
    (*out)->n_pairs = n_pairs;
    return PLK_OK;
}
void plk_adapter_free(plk_adapter *adapter) { free(adapter); }
int plk_adapters_set(plk_context *c, int32_t n, plk_adapter *const *adapters, const float *scales) {
    float sum = 0;
    for (int i = 0; i < n; i++) {
        if (adapters[i]->n_pairs > 100) return fail(PLK_EUNSUPPORTED, "too many nodes");
        sum += scales[i];
    }
    c->adapters = sum;
    return PLK_OK;
}

int plk_context_new(plk_model *model, const plk_context_params *params, plk_context **out) {
    if (params->n_ctx == 0 || params->n_batch == 0) return fail(PLK_ECONTEXT, "n_ctx is 0");
    if (params->n_ctx > (1 << 20)) return fail(PLK_EMEMORY, "too many cells");
    plk_context *c = calloc(1, sizeof *c);
    c->model = model;
    c->params = *params;
    c->n = (int) params->n_ctx;
    c->tokens = calloc((size_t) c->n, sizeof(int32_t));
    memset(c->last, -1, sizeof c->last);
    c->logits = calloc((size_t) params->n_batch * N_VOCAB, sizeof(float));
    c->output_of = calloc(params->n_batch, sizeof(int));
    c->cancel_after = -1;
    model->contexts++;
    alive++;
    *out = c;
    return PLK_OK;
}
void plk_context_free(plk_context *c) {
    c->model->contexts--;
    alive--;
    free(c->tokens);
    free(c->state);
    free(c->logits);
    free(c->output_of);
    free(c);
}
int plk_context_read(const plk_context *c, plk_context_info *out) {
    uint32_t size = out->size;
    *out = (plk_context_info) { size, c->params.n_ctx, c->params.n_batch, c->params.n_ubatch,
                                c->params.n_seq_max, PLK_MEMORY_ATTENTION, 1, 1, -1, 1, 1,
                                c->params.flash_attn > 0, c->params.flash_attn <= 0, 0, 1 };
    out->n_threads = c->params.n_threads;
    out->n_threads_batch = c->params.n_threads_batch;
    out->pooling = c->params.embeddings ? c->params.pooling : -1;
    return PLK_OK;
}
int plk_threads(plk_context *c, int32_t n_threads, int32_t n_threads_batch) {
    if (n_threads < 1) return fail(PLK_EINVAL, "n_threads");
    c->params.n_threads = n_threads;
    c->params.n_threads_batch = n_threads_batch;
    return PLK_OK;
}

static int32_t (*interrupts_check)(void);
static uint64_t interrupts_thread;
void plk_interrupts(int32_t (*check)(void), uint64_t thread) {
    interrupts_check = check;
    interrupts_thread = thread;
}
static int poll_cancel(plk_context *c) {
    c->polls++;
    return c->cancelled || (c->cancel_after >= 0 && c->polls > c->cancel_after);
}
static int script(plk_context *c, int32_t token) {
    switch (token) {
    case T_ABORT: fprintf(stderr, "fake: GGML_ASSERT(token != abort) failed\n"); abort();
    case T_THROW: return fail(PLK_EEXCEPTION, "invalid token");
    case T_MINUS: return -3;
    case T_HANG:
        while (!poll_cancel(c)) {
            usleep(1000);
            if (interrupts_check && interrupts_thread == (uint64_t) pthread_self())
                c->cancelled |= interrupts_check() != 0;
        }
        return PLK_ABORTED;
    case T_EXIT: exit(7);
    case T_SEGV: *(volatile int *) 8 = 1; return 0;
    case T_SLOW: usleep(50000); return 0;
    case T_LOG: say(3, "fake: warned"); return 0;
    case T_FULL: say(4, "fake: failed to find KV cache slot"); return PLK_NO_SLOT;
    case T_FLOOD: for (int i = 0; i < 100; i++) say(2, "fake: line %d", i); return 0;
    default: return poll_cancel(c) ? PLK_ABORTED : 0;
    }
}
static void put_logits(plk_context *c, int place, int32_t token, int32_t pos) {
    float *row = c->logits + (size_t) c->outputs * N_VOCAB;
    for (int v = 0; v < N_VOCAB; v++) row[v] = c->adapters - ((v - token - pos - 1) & 255);
    c->output_of[place] = c->outputs++;
}
static int decode_embeddings(plk_context *c, plk_batch b) {
    if (c->params.guard) return fail(PLK_EUNSUPPORTED, "a guarded context decodes no embeddings");
    if (b.n_tokens != 1 || b.n_pos != 4) return fail(PLK_EINVAL, "wrong shape");
    int32_t token = (int32_t) b.embd[b.n_embd - 1], at = b.pos[0] + b.pos[b.n_pos - 1];
    b.token = &token, b.pos = &at, b.embd = NULL;
    return plk_decode(c, &b);
}
int plk_decode(plk_context *c, const plk_batch *b) {
    if (b->n_tokens < 1) return -1;
    if (b->embd) return decode_embeddings(c, *b);
    if (b->n_tokens > (int32_t) c->params.n_batch) return fail(PLK_EINVAL, "n_tokens > n_batch");
    for (int32_t i = 0; i < b->n_tokens; i++)
        if (b->token[i] < 0 || b->token[i] >= N_VOCAB) return fail(PLK_EINVAL, "invalid token");
    int status = 0;
    const int32_t *ids = b->seq_id;
    c->outputs = 0;
    c->polls = 0;
    for (int32_t at = 0; at < b->n_tokens && !status; at++) {
        char owners[64] = "";
        for (int k = 0, m = b->seq_count ? b->seq_count[at] : 1; k < m; k++) {
            size_t end = strlen(owners);
            snprintf(owners + end, sizeof owners - end, "%s%d", k ? "+" : "", *ids++);
        }
        say(1, "token %d at %d of %s", b->token[at], b->pos[at], owners);
        status = script(c, b->token[at]);
        c->output_of[at] = -1;
        if (b->logits ? b->logits[at] : at == b->n_tokens - 1)
            put_logits(c, at, b->token[at], b->pos[at]);
    }
    ids = b->seq_id;
    for (int32_t at = 0; at < b->n_tokens && !status; at++)
        for (int k = 0, m = b->seq_count ? b->seq_count[at] : 1; k < m; k++)
            c->last[*ids++ & 63] = b->pos[at];
    c->cancelled = 0;
    return status;
}
const float *plk_logits(plk_context *c, int32_t index) {
    int row = index < 0 ? c->outputs + index
            : index < (int32_t) c->params.n_batch && c->outputs ? c->output_of[index] : -1;
    return row < 0 || row >= c->outputs ? NULL : c->logits + (size_t) row * N_VOCAB;
}
const float *plk_logits_all(plk_context *c, int32_t *rows) {
    *rows = c->outputs;
#ifdef FAKE_APART
    return NULL;
#else
    return c->outputs ? c->logits : NULL;
#endif
}
const float *plk_embeddings(plk_context *c, int32_t index) {
    if (!c->params.embeddings || !c->outputs) return NULL;
    for (int i = 0; i < 32; i++) c->embedding[i] = (float) index;
    return c->embedding;
}
void plk_synchronize(plk_context *c) { (void) c; }
void plk_cancel(plk_context *c) { c->cancelled = 1; }
void plk_cancel_after(plk_context *c, int64_t polls) { c->cancel_after = polls; }
int64_t plk_cancel_polls(const plk_context *c) { return c->polls; }

/* Log a call of an operation on cells with its arguments. */
#define CALLED(...) (say(1, __VA_ARGS__), PLK_OK)
int plk_clear(plk_context *c, int32_t data) {
    memset(c->last, -1, sizeof c->last);
    return CALLED("clear %d", data);
}
int plk_seq_rm(plk_context *c, int32_t seq, int32_t p0, int32_t p1) {
    (void) c;
    if (seq == 62 && p1 >= 0) return fail(PLK_EREFUSED, "a part of a state"); /* as if recurrent */
    return CALLED("seq_rm %d %d %d", seq, p0, p1);
}
int plk_seq_cp(plk_context *c, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    (void) c;
    return CALLED("seq_cp %d %d %d %d", from, to, p0, p1);
}
int plk_seq_keep(plk_context *c, int32_t seq) {
    (void) c;
    return CALLED("seq_keep %d", seq);
}
int plk_seq_add(plk_context *c, int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
    (void) c;
    return CALLED("seq_add %d %d %d %d", seq, p0, p1, delta);
}
int plk_seq_div(plk_context *c, int32_t seq, int32_t p0, int32_t p1, int32_t divisor) {
    (void) c;
    if (divisor < 1) return fail(PLK_EINVAL, "divisor");
    return CALLED("seq_div %d %d %d %d", seq, p0, p1, divisor);
}
int32_t plk_seq_pos_min(plk_context *c, int32_t seq) {
    return c->last[seq & 63] < 0 ? -1 : 100 + seq;
}
int32_t plk_seq_pos_max(plk_context *c, int32_t seq) { return c->last[seq & 63]; }

int plk_defrag(plk_context *c, plk_defrag_report *out) {
    (void) c;
    if (!(plk_capabilities() & PLK_CAP_DEFRAG)) return fail(PLK_EUNSUPPORTED, "no defrag");
    *out = (plk_defrag_report) { out->size, 1, 2, 3, 4, 5, 6, 7, 8 };
    return PLK_OK;
}
int plk_update(plk_context *c) {
    (void) c;
    return CALLED("update");
}
int plk_cells_info_read(plk_context *c, int32_t cache, plk_cells_info *out) {
    if (!(plk_capabilities() & PLK_CAP_CELLS)) return fail(PLK_EUNSUPPORTED, "no cells");
    if (cache) return fail(PLK_EINVAL, "no such cache");
    *out = (plk_cells_info) { out->size, 3, 1, c->n, 4, 5, 1, 6, 7, 8, 0, 1, 10, 11 };
    return PLK_OK;
}
int plk_cells_read(plk_context *c, int32_t cache, int32_t room, int32_t *pos, int32_t *shift,
                   uint64_t *seqs, int32_t words) {
    if (cache || room < c->n) return fail(PLK_EINVAL, "room");
    for (int i = 0; i < c->n; i++) {
        pos[i] = i + c->reads;
        shift[i] = -i;
        for (int w = 0; w < words; w++)
            seqs[(size_t) i * words + w] = w < 2 ? (uint64_t) i << (32 * w) : 0;
    }
    c->reads++;
    return c->n;
}
int plk_counters_read(plk_context *c, plk_counters *out) {
    (void) c;
    if (!(plk_capabilities() & PLK_CAP_COUNTERS)) return fail(PLK_EUNSUPPORTED, "no counters");
    for (int i = 0; i < 11; i++) (&out->slot_searches)[i] = i + 1;
    return PLK_OK;
}

/* Mapped memory of one layer, a page each for K and V; a kept file has only its tokens. */
int plk_mapping_read(plk_context *c, plk_mapping *out) {
    if (!c->params.kv_backing) return fail(PLK_EUNSUPPORTED, "on the heap");
    out->kind = c->params.kv_backing;
    out->n_mappings = 1;
    out->n_tensors = 2;
    out->n_cells = c->n;
    out->kept = c->params.kv_keep > 0;
    out->bytes_reserved = 8192;
    out->bytes_committed = 4096;
    return PLK_OK;
}
int32_t plk_mapping_tensors(plk_context *c, int32_t room, int64_t *rows) {
    if (!c->params.kv_backing) return fail(PLK_EUNSUPPORTED, "on the heap");
    if (room < 2) return fail(PLK_EINVAL, "room");
    for (int32_t i = 0; i < 2; i++) {
        const int64_t row[5] = {0, 3, i, 4096, i ? 0 : 4096};
        memcpy(rows + 5 * i, row, sizeof row);
    }
    return 2;
}
int64_t plk_mapping_trim(plk_context *c) {
    return c->params.kv_backing ? 4096 : fail(PLK_EUNSUPPORTED, "on the heap");
}
int plk_mapping_flush(plk_context *c, const int32_t *tokens, int32_t n_tokens) {
    if (!c->params.kv_keep) return fail(PLK_EUNSUPPORTED, "not kept");
    if (n_tokens != c->n) return fail(PLK_EINVAL, "as many tokens as cells");
    memcpy(c->tokens, tokens, (size_t) c->n * sizeof *tokens);
    return PLK_OK;
}
int32_t plk_mapping_tokens(plk_context *c, int32_t room, int32_t *tokens) {
    if (room < c->n) return fail(PLK_EINVAL, "room");
    memcpy(tokens, c->tokens, (size_t) c->n * sizeof *tokens);
    return c->n;
}

int64_t plk_state_size(plk_context *c, int32_t seq) {
    (void) seq;
    return c->state_size;
}
int64_t plk_state_save(plk_context *c, int32_t seq, uint8_t *data, int64_t room) {
    say(1, "state_save %d", seq);
    if (c->state_size > room) return fail(PLK_ESTATE, "room");
    if (c->state) memcpy(data, c->state, (size_t) c->state_size);
    return c->state_size;
}
int64_t plk_state_load(plk_context *c, int32_t seq, const uint8_t *data, int64_t length) {
    say(1, "state_load %d", seq);
    if (length % 8) return fail(PLK_ESTATE, "not a state");
    if (length > 8 * c->n) return 0;
    c->state = realloc(c->state, (size_t) length + 1);
    memcpy(c->state, data, (size_t) length);
    return c->state_size = length;
}

int plk_sampler_new(const plk_model *model, const plk_sampler_params *params, plk_sampler **out) {
    (void) model;
    if (params->grammar && !strstr(params->grammar, "::="))
        return fail(PLK_EGRAMMAR, "line 1, column 1: expecting ::=");
    *out = calloc(1, sizeof **out);
    (*out)->params = *params;
    return PLK_OK;
}
void plk_sampler_free(plk_sampler *sampler) { free(sampler); }
void plk_sampler_reset(plk_sampler *sampler) { sampler->taken = 0; }
int32_t plk_sample(plk_sampler *sampler, plk_context *context, int32_t index) {
    const float *row = plk_logits(context, index);
    if (!row) return fail(PLK_EINVAL, "no logits there");
    int32_t best = 0;
    for (int32_t v = 1; v < N_VOCAB; v++) if (row[v] > row[best]) best = v;
    sampler->taken++;
    return best;
}
int32_t plk_sample_logits(plk_sampler *sampler, const float *logits, int32_t n_vocab) {
    int32_t best = 0;
    if (n_vocab != N_VOCAB) return fail(PLK_EINVAL, "not the size of the vocabulary");
    for (int32_t v = 1; v < N_VOCAB; v++) if (logits[v] > logits[best]) best = v;
    sampler->taken++;
    return isinf(logits[best]) ? fail(PLK_ENOTOKEN, "every token is excluded") : best;
}
int plk_sampler_accept(plk_sampler *sampler, const int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        if (tokens[i] >= N_VOCAB) return fail(PLK_EINVAL, "token is not in the vocabulary");
    sampler->taken += n;
    return PLK_OK;
}
int32_t plk_sample_all(plk_sampler *sampler, plk_context *context, int32_t *tokens, int32_t room) {
    if (room < context->outputs) return fail(PLK_EINVAL, "room");
    if (!context->outputs) return fail(PLK_EINVAL, "no logits at all");
    for (int i = 0; i < context->outputs; i++)
        tokens[i] = plk_sample(sampler, context, i - context->outputs);
    return context->outputs;
}
int plk_run(plk_sampler *sampler, plk_context *context, int32_t n, const int32_t *seq_id,
            const int32_t *pos, int32_t *tokens, int32_t steps, int32_t stop, int32_t *done) {
    int32_t at[64];
    int8_t all[64];
    if (n > 64) return fail(PLK_EINVAL, "too many for the fake");
    memcpy(at, pos, (size_t) n * sizeof *at);
    memset(all, 1, sizeof all);
    for (*done = 0; *done < steps;) {
        plk_batch b = { sizeof b, n, tokens, at, NULL, seq_id, all };
        int code = plk_decode(context, &b);
        if (code) return code;
        ++*done;
        tokens += n;
        plk_sample_all(sampler, context, tokens, n);
        for (int i = 0; i < n; i++) {
            at[i]++;
            if (stop && tokens[i] == EOS) return 0;
        }
    }
    return 0;
}
