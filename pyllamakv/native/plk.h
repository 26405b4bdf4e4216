/* plk.h: the complete C interface between Python and one build of llama.cpp.
 *
 * The interface uses only ints, pointers and flat structs. Every struct begins with `size`, the
 * caller's sizeof, so that fields can be added at its end. Log records are kept in a ring, and a
 * cancel sets a flag; the only callback is that of plk_interrupts. No function throws a C++ exception.
 * Functions that return int return 0, a positive status of their own, or a negative PLK_E code;
 * plk_last_error() returns the text of this thread's last error. Arguments are checked before they
 * reach llama.cpp: values on which it would assert return PLK_EINVAL. An assertion that fails
 * nevertheless returns PLK_EEXCEPTION if it fails outside of a computation; its context then refuses
 * all calls but plk_context_free (Linux; elsewhere it ends the process).
 *
 * cffi reads the part between the two cdef marks: plain declarations, and of the preprocessor only
 * `#define NAME integer`.
 */
#ifndef PLK_H
#define PLK_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* cdef begin */
#define PLK_ABI 1

/* Statuses. plk_decode returns 0, 1 and 2 of llama_decode unchanged. */
#define PLK_OK 0
#define PLK_NO_SLOT 1
#define PLK_ABORTED 2
#define PLK_EINVAL -1001      /* an argument is out of range */
#define PLK_EUNSUPPORTED -1002 /* this build lacks the capability */
#define PLK_EEXCEPTION -1003  /* C++ exception; plk_last_error() has its text */
#define PLK_EMEMORY -1004     /* an allocation failed */
#define PLK_EMODEL -1005      /* the model file cannot be loaded */
#define PLK_ECONTEXT -1006    /* the context cannot be created */
#define PLK_EREFUSED -1007    /* the memory cannot do this, e.g. a partial removal */
#define PLK_ESTATE -1008      /* a state cannot be read or written */
#define PLK_ESPACE -1009      /* no disk space for the file of a cache */
#define PLK_EBUSY -1010       /* another owner has locked the file of a cache */
#define PLK_EDIRTY -1011      /* the file of a cache was not flushed after its last change */
#define PLK_EFOREIGN -1012    /* not a cache file, or of another model, build or shape */
#define PLK_EDAMAGED -1013    /* a checksum in the file of a cache is wrong */
#define PLK_EGRAMMAR -1014    /* a grammar does not parse */
#define PLK_ENOTOKEN -1015    /* no token is allowed as the next one */
#define PLK_EADAPTER -1016    /* an adapter cannot be loaded */

/* Bits of plk_capabilities(): features of this build. */
#define PLK_CAP_DEFRAG 1          /* plk_defrag moves cells */
#define PLK_CAP_CELLS 2           /* plk_cells_read is exact */
#define PLK_CAP_COUNTERS 4        /* plk_counters_read works */
#define PLK_CAP_STATES 8          /* plk_state_* work per sequence */
#define PLK_CAP_STREAMS 16        /* a cache can have one stream per sequence */
#define PLK_CAP_SWA 32            /* sliding-window caches exist */
#define PLK_CAP_SAMPLER 64        /* plk_sampler_* work */
#define PLK_CAP_KV_UNIFIED 128    /* plk_context_params.kv_unified has an effect */
#define PLK_CAP_FLASH_AUTO 256    /* flash_attn = -1 (llama.cpp decides) is supported */
#define PLK_CAP_SWA_FULL 512      /* plk_context_params.swa_full has an effect */
#define PLK_CAP_ROLLBACK 1024     /* llama_decode undoes a batch that found no slot */
#define PLK_CAP_DEFRAG_OPTIONS 2048 /* defrag_plan, _mover and _threads have an effect */
#define PLK_CAP_MAPPING 4096      /* kv_backing has an effect, plk_mapping_* work */
#define PLK_CAP_SAMPLER_CHAIN 8192 /* plk_sampler_params after penalty_repeat have an effect */
#define PLK_CAP_GRAMMAR 16384     /* plk_sampler_params.grammar has an effect */
#define PLK_CAP_TOP_N_SIGMA 32768
#define PLK_CAP_XTC 65536
#define PLK_CAP_DRY 131072
#define PLK_CAP_ADAPTIVE_P 262144
#define PLK_CAP_ADAPTERS 524288   /* plk_adapter_* work */
#define PLK_CAP_RANK 1048576      /* plk_context_params.pooling can be PLK_POOLING_RANK */
#define PLK_CAP_THREADS 2097152   /* contexts may compute at the same time with several threads each */

/* Kinds of memory, plk_context_info.memory. */
#define PLK_MEMORY_NONE 0
#define PLK_MEMORY_ATTENTION 1    /* one key/value cache */
#define PLK_MEMORY_SWA 2          /* a full cache and a sliding-window cache */
#define PLK_MEMORY_RECURRENT 3    /* states, no cells per token */
#define PLK_MEMORY_HYBRID 4       /* cells, and states or compressed rows */
#define PLK_MEMORY_OTHER 5

/* Backings of a cache in host memory, plk_context_params.kv_backing and plk_mapping.kind. */
#define PLK_BACKING_HEAP 0
#define PLK_BACKING_ANONYMOUS 1
#define PLK_BACKING_TEMPORARY 2   /* an unlinked file; kv_path is a directory */
#define PLK_BACKING_FILE 3

/* Pooling of embeddings, plk_context_params.pooling and plk_context_info.pooling. */
#define PLK_POOLING_MODEL -1 /* as the model file says, else none; info: no embeddings */
#define PLK_POOLING_NONE 0   /* an embedding per token */
#define PLK_POOLING_MEAN 1
#define PLK_POOLING_CLS 2    /* of the first token */
#define PLK_POOLING_LAST 3
#define PLK_POOLING_RANK 4   /* outputs of the model's classification head */

typedef struct plk_model plk_model;
typedef struct plk_context plk_context;
typedef struct plk_sampler plk_sampler;
typedef struct plk_adapter plk_adapter;

typedef struct {
    uint32_t size;
    int32_t n_gpu_layers;
    int32_t use_mmap;
    int32_t use_mlock;
    int32_t check_tensors;
    int32_t vocab_only;
    const char *rpc_servers; /* host:port,host:port or NULL */
    const char *devices;     /* names from plk_device_read, separated by commas, or NULL */
} plk_model_params;

typedef struct {
    uint32_t size;
    int32_t n_vocab;
    int32_t n_ctx_train;
    int32_t n_embd;
    int32_t n_layer;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t n_embd_k_gqa; /* of the first layer; 0 unknown */
    int32_t n_embd_v_gqa;
    int32_t has_vocab;    /* 0: token ids only */
    int32_t token_bos;    /* -1: none */
    int32_t token_eos;
    int32_t token_eot;
    int32_t token_nl;
    int32_t add_bos;
    int32_t is_recurrent;
    uint64_t n_params;
    uint64_t n_bytes;
    int32_t n_cls_out; /* outputs of a classification head; 0: the release does not report it */
    int32_t n_embd_out; /* of an embedding */
} plk_model_info;

typedef struct {
    uint32_t size;
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t flash_attn;    /* 0 off, 1 on, -1 decided by llama.cpp */
    int32_t type_k;        /* ggml_type number: 0 f32, 1 f16, 2 q4_0, 8 q8_0, 30 bf16, ... */
    int32_t type_v;
    int32_t kv_unified;    /* 1: all sequences share the cells; see plk_context_info.n_streams */
    int32_t swa_full;
    int32_t offload_kqv;
    int32_t embeddings;
    float defrag_thold;    /* 0: never compact automatically; negative: the library's default */
    int32_t guard;         /* 1: undo failed decodes if the release does not; 0: stock */
    int32_t defrag_plan;   /* 0: default, 1: keep the order of the cells, 2: move the fewest */
    int32_t defrag_mover;  /* 0: automatic, 1: host, 2: gather, 3: graph, 4: staged */
    int32_t defrag_threads; /* maximum number of host threads that move cells; 0: n_threads */
    int32_t kv_backing;    /* PLK_BACKING_* */
    const char *kv_path;   /* a file, or a directory for an unlinked file */
    int32_t kv_keep;       /* 1: resume from the file, 2: start empty */
    int32_t kv_huge;       /* 1: huge pages, committed 2 MB at a time */
    const char *kv_model;  /* identifies what a kept file depends on in addition to its shape */
    int32_t pooling;       /* PLK_POOLING_*; has an effect with embeddings */
} plk_context_params;

typedef struct {
    uint32_t size;
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    int32_t memory;            /* PLK_MEMORY_* */
    int32_t n_caches;          /* number of (cache, stream) pairs that plk_cells_read can read */
    int32_t can_shift;
    int32_t can_remove_partly; /* -1: unknown until tried */
    int32_t contiguous_slots;  /* 1: a micro-batch needs contiguous cells; 0: no; -1 unknown */
    int32_t defrag;            /* 1: plk_defrag works on this context's memory */
    int32_t flash_attn;        /* the effective value; -1 unknown */
    int32_t v_transposed;      /* V cache stored by columns; -1 unknown */
    int32_t n_swa;             /* positions that a sliding-window cache keeps; 0: no such cache */
    int32_t n_streams;         /* of each cache; 1: sequences share the cells; 0: no cells; -1 unknown */
    float defrag_thold;        /* in effect; <= 0: never */
    int32_t defrag_plan;       /* in effect; 0 unknown */
    int32_t defrag_mover;      /* in effect; -1 unknown */
    int32_t defrag_threads;    /* in effect; 0 unknown */
    int32_t pooling;           /* PLK_POOLING_* in effect */
    int32_t n_threads;
    int32_t n_threads_batch;
} plk_context_info;

typedef struct {
    uint32_t size;
    int32_t n_tokens;
    const int32_t *token;
    const int32_t *pos;       /* 0 to 2^30 - 1, of compressed rows to the cells of a stream - 1 */
    const int32_t *seq_count; /* sequences per token, in streams 1; NULL: one each */
    const int32_t *seq_id;    /* flat: seq_count[0] ids, then seq_count[1] ids, ... */
    const int8_t *logits;     /* 1: logits wanted; NULL: of the last token only */
    const float *embd;        /* instead of tokens: n_tokens rows of n_embd values; NULL: none */
    int32_t n_embd;
    int32_t n_pos;            /* rows of pos with embd, n_tokens each: 4 (time, row, column, 0) for a
                                 model with M-RoPE, else 1 */
} plk_batch;

typedef struct {
    uint32_t size;
    int32_t stream;        /* index of the stream in its cache; 0 if unified */
    int32_t swa;           /* 1: the sliding-window cache */
    int32_t n_cells;
    int32_t used;          /* the library's count of used cells; -1 unknown */
    int32_t head;          /* -1 unknown */
    int32_t has_shift;     /* a shift is pending */
    int32_t n_layer;       /* layers with K and V in this cache */
    int32_t type_k;
    int32_t type_v;
    int32_t v_transposed;
    int32_t host;          /* 1: every buffer is host memory */
    uint64_t bytes_k;
    uint64_t bytes_v;
} plk_cells_info;

typedef struct {
    uint32_t size;
    int32_t passes;        /* batches of moves; -1 unknown */
    int32_t moves;         /* number of moved runs; -1 unknown */
    int32_t cells;         /* cells moved, by comparing the cells before and after; -1 unknown */
    int64_t bytes;         /* -1 unknown */
    int64_t graphs;        /* -1 unknown */
    int64_t ns;            /* wall time of the call */
    int64_t plan_ns;       /* part of ns that planning took; -1 unknown */
    int64_t scratch_bytes; /* maximum of all calls, beyond the cache; -1 unknown */
} plk_defrag_report;

typedef struct {
    uint32_t size;
    uint32_t reserved;
    int64_t slot_searches;
    int64_t slot_failures;
    int64_t decode_retries;
    int64_t defrags;
    int64_t moves;
    int64_t cells_moved;
    int64_t bytes_moved;
    int64_t graphs;
    int64_t ns;
    int64_t plan_ns;       /* part of ns that planning took */
    int64_t scratch_bytes; /* not a sum: maximum of a defragmentation, beyond the cache */
} plk_counters;

typedef struct {
    uint32_t size;
    int32_t kind;          /* PLK_BACKING_* */
    int32_t n_mappings;    /* caches in mapped memory */
    int32_t n_tensors;     /* tensors in these caches: number of rows of plk_mapping_tensors */
    int32_t n_cells;       /* cells of all their streams: n_tokens of plk_mapping_flush */
    int32_t kept;
    int32_t resumed;       /* 1: the context contains the cells of the file */
    int32_t reserved;
    uint64_t generation;   /* number of flushes of the file */
    uint64_t bytes_reserved;
    uint64_t bytes_committed; /* resident in this process */
    uint64_t bytes_file;      /* on disk */
    uint64_t bytes_elsewhere; /* K and V on devices, which are not mapped */
} plk_mapping;

typedef struct {
    uint32_t size;
    int32_t kind;          /* 0 cpu, 1 gpu, 2 accelerator, -1 unknown */
    uint64_t memory_free;
    uint64_t memory_total;
    char name[64];
    char description[128];
} plk_device;

typedef struct {
    uint32_t size;
    uint32_t seed;
    float temperature;     /* <= 0: greedy */
    int32_t top_k;         /* <= 0: off */
    float top_p;           /* >= 1: off */
    float min_p;           /* <= 0: off */
    int32_t penalty_last_n;
    float penalty_repeat;
    float penalty_freq;    /* per occurrence in the last tokens; 0: off */
    float penalty_present; /* if a token occurs in the last tokens; 0: off */
    float typical_p;       /* <= 0 or >= 1: off */
    float top_n_sigma;     /* <= 0: off */
    float xtc_probability; /* <= 0: off */
    float xtc_threshold;
    float dry_multiplier;  /* <= 0: off */
    float dry_base;
    int32_t dry_allowed_length;
    int32_t dry_penalty_last_n;
    float dynatemp_range;  /* <= 0: off */
    float dynatemp_exponent;
    int32_t mirostat;      /* 1 or 2; 0: off */
    float mirostat_tau;
    float mirostat_eta;
    float adaptive_target; /* <= 0: off */
    float adaptive_decay;
    int32_t n_bias;
    const int32_t *bias_token;
    const float *bias;        /* added to the logits; -INFINITY: never sample the token */
    const char *samplers;     /* names in order, separated by commas; NULL: the default */
    const char *dry_breakers; /* strings separated by \x1f, ASCII's unit separator; NULL: none */
    const char *grammar;      /* GBNF with the rule root, or NULL */
} plk_sampler_params;

/* The library. */
uint32_t plk_abi(void);
const char *plk_variant(void);        /* the id in the library's manifest */
uint64_t plk_capabilities(void);
const char *plk_probes(void);         /* JSON: group -> chosen candidate or null */
int32_t plk_sizeof(const char *name); /* sizeof a struct above; -1 unknown name */
int plk_init(void);                   /* once per process; repeated calls do nothing */
const char *plk_last_error(void);
int32_t plk_log_read(int32_t *level, char *text, int32_t room); /* bytes of one record; -1 empty */
int64_t plk_log_lost(void);           /* number of records that the ring dropped */
void plk_log_level(int32_t lowest);   /* minimum level to keep: 1 debug, 2 info, 3 warn, 4 error */
int32_t plk_device_count(void);
int plk_device_read(int32_t index, plk_device *out);
int plk_rpc_serve(const char *endpoint, const char *device, uint64_t memory); /* blocks */

/* Models. */
int plk_model_load(const char *path, const plk_model_params *params, plk_model **out);
void plk_model_free(plk_model *model);
int plk_model_read(const plk_model *model, plk_model_info *out);
int32_t plk_model_meta(const plk_model *model, const char *key, char *text, int32_t room); /* length; -1 absent */
int32_t plk_tokenize(const plk_model *model, const char *text, int32_t length, int32_t *tokens,
                     int32_t room, int32_t add_special, int32_t parse_special); /* count; -needed */
int32_t plk_token_piece(const plk_model *model, int32_t token, char *piece, int32_t room,
                        int32_t special); /* bytes; -needed */
int32_t plk_token_is_eog(const plk_model *model, int32_t token);

/* LoRA adapters. The caller checks the file, because llama.cpp asserts on metadata of a wrong type,
 * and counts its pairs of tensors. An adapter lives until it and all contexts that use it are freed. */
int plk_adapter_load(plk_model *model, const char *path, int32_t n_pairs, plk_adapter **out);
void plk_adapter_free(plk_adapter *adapter);
/* Replace the adapters of a context; nothing is changed on failure. The cells keep what was computed
 * with the former ones. */
int plk_adapters_set(plk_context *context, int32_t n, plk_adapter *const *adapters,
                     const float *scales);

/* Contexts. */
int plk_context_new(plk_model *model, const plk_context_params *params, plk_context **out);
void plk_context_free(plk_context *context);
int plk_context_read(const plk_context *context, plk_context_info *out);
int plk_threads(plk_context *context, int32_t n_threads, int32_t n_threads_batch);
/* PLK_EUNSUPPORTED for embeddings in a guarded context: a failed decode could not be undone. */
int plk_decode(plk_context *context, const plk_batch *batch);
const float *plk_logits(plk_context *context, int32_t index); /* by place in the batch; NULL none */
/* All rows of the last batch and their number; NULL if the rows are not contiguous. */
const float *plk_logits_all(plk_context *context, int32_t *rows);
/* Of a place of the last batch; with pooling, of a sequence. n_embd_out values, or n_cls_out (1 if
 * unknown) for PLK_POOLING_RANK. */
const float *plk_embeddings(plk_context *context, int32_t index);
void plk_synchronize(plk_context *context);
void plk_cancel(plk_context *context);                     /* callable from any thread */
void plk_cancel_after(plk_context *context, int64_t polls); /* of the abort callback; < 0: never */
int64_t plk_cancel_polls(const plk_context *context);      /* polls of the last decode */
/* Call `check` about every 20 ms during decodes of the thread whose pthread_self() is `thread`, until
 * it returns something other than 0: that ends the decode as plk_cancel does. NULL: never. `check`
 * may use other contexts. */
void plk_interrupts(int32_t (*check)(void), uint64_t thread);

/* Sequences. p0 < 0: from the start, p1 < 0: to the end. A sequence outside 0 to n_seq_max - 1, and
 * a range with p1 < p0, return PLK_EINVAL; an empty range changes nothing. */
int plk_clear(plk_context *context, int32_t data);
int plk_seq_rm(plk_context *context, int32_t seq, int32_t p0, int32_t p1); /* seq < 0: all */
int plk_seq_cp(plk_context *context, int32_t from, int32_t to, int32_t p0, int32_t p1);
int plk_seq_keep(plk_context *context, int32_t seq);
int plk_seq_add(plk_context *context, int32_t seq, int32_t p0, int32_t p1, int32_t delta);
int plk_seq_div(plk_context *context, int32_t seq, int32_t p0, int32_t p1, int32_t divisor);
int32_t plk_seq_pos_min(plk_context *context, int32_t seq); /* -1 empty; < -1000 error */
int32_t plk_seq_pos_max(plk_context *context, int32_t seq);

/* The cache. */
int plk_defrag(plk_context *context, plk_defrag_report *out);
int plk_update(plk_context *context); /* apply pending shifts and copies */
int plk_cells_info_read(plk_context *context, int32_t cache, plk_cells_info *out);
int plk_cells_read(plk_context *context, int32_t cache, int32_t room, int32_t *pos,
                   int32_t *shift, uint64_t *seqs, int32_t words); /* count; pos -1: free cell */
int plk_counters_read(plk_context *context, plk_counters *out);

/* A cache in mapped memory; PLK_EUNSUPPORTED if the cache is on the heap. */
int plk_mapping_read(plk_context *context, plk_mapping *out);
/* Write rows of cache, layer, 0 for K or 1 for V, bytes reserved, bytes committed; return their
 * number. plk_mapping_tensors and plk_mapping_tokens return PLK_EINVAL if `room` is too small. */
int32_t plk_mapping_tensors(plk_context *context, int32_t room, int64_t *rows);
int64_t plk_mapping_trim(plk_context *context); /* bytes released */
/* Flush a kept cache to its file, with one token per cell (-1 unknown) or NULL. */
int plk_mapping_flush(plk_context *context, const int32_t *tokens, int32_t n_tokens);
int32_t plk_mapping_tokens(plk_context *context, int32_t room, int32_t *tokens); /* as flushed */

/* States of single sequences. The state of an empty sequence empties the one that it is loaded into. */
int64_t plk_state_size(plk_context *context, int32_t seq);
int64_t plk_state_save(plk_context *context, int32_t seq, uint8_t *data, int64_t room);
int64_t plk_state_load(plk_context *context, int32_t seq, const uint8_t *data, int64_t length);

/* Sampling in C. */
int plk_sampler_new(const plk_model *model, const plk_sampler_params *params, plk_sampler **out);
void plk_sampler_free(plk_sampler *sampler);
void plk_sampler_reset(plk_sampler *sampler);
int32_t plk_sample(plk_sampler *sampler, plk_context *context, int32_t index); /* token */
int32_t plk_sample_all(plk_sampler *sampler, plk_context *context, int32_t *tokens,
                       int32_t room); /* for each place with logits; count */
/* Sample from n = n_vocab logits of the caller, which are finite or -INFINITY; token. */
int32_t plk_sample_logits(plk_sampler *sampler, const float *logits, int32_t n);
/* Add tokens to the history that penalties and DRY compare with. */
int plk_sampler_accept(plk_sampler *sampler, const int32_t *tokens, int32_t n);
/* Decode one token of each of n sequences and sample the next ones, `steps` times or, if `stop` is
 * set, until a sampled token is an end of generation. `tokens` has steps + 1 rows of n; the caller
 * sets the first. `done` is the number of decoded steps, also if the status is not 0. */
int plk_run(plk_sampler *sampler, plk_context *context, int32_t n, const int32_t *seq_id,
            const int32_t *pos, int32_t *tokens, int32_t steps, int32_t stop, int32_t *done);
/* cdef end */

#ifdef __cplusplus
}
#endif
#endif
