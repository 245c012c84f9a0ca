/* Gradients of convolutions from the few outputs with a non-zero gradient.
 *
 * After a 2×2 max-pool and a ReLU at most one of a window's four outputs has a gradient, and none if the maximum
 * is not positive: in measurements an eighth of all outputs. Their gradients are listed, for each channel the values and
 * the places of the patches they belong to, and both products are sums over these lists:
 *
 *     weights:  dW[c] = Σ g · patch           a block of dW[c] is in registers for the whole list
 *     inputs:   dX[patch] += Σ_c g_c · W[c]   over the channels whose maximum is at this position
 */
#include <string.h>

#include "chain.h"

/* Blocks: ROWS rows of VECS vectors, at most ACCUMULATORS in all. */
#define BLOCKS(X) \
    X(1, 1) X(1, 2) X(1, 3) X(1, 4) X(1, 5) X(1, 6) X(1, 7) X(1, 8) X(1, 9) X(1, 10) X(1, 11) X(1, 12) \
    X(2, 1) X(2, 2) X(2, 3) X(2, 4) X(2, 5) X(2, 6) X(3, 1) X(3, 2) X(3, 3) X(3, 4) X(5, 1) X(5, 2)
#define BLOCK_ID(ROWS, VECS) ((ROWS) * 16 + (VECS))

/* d[ROWS][VECS] (+)= Σ g · x[patch]; small blocks sum in two halves to hide the latency of additions */
INLINE void add_patches(const int ROWS, const int VECS, const float *g, const int32_t *patch, int count, const float *x,
                        long x_row, float *d, long d_row, int fresh) {
    const int TWO = ROWS * VECS <= ACCUMULATORS / 2;
    vec a[5][ACCUMULATORS], b[5][ACCUMULATORS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) {
        a[r][v] = fresh ? splat(0) : load(d + r * d_row + 8 * v);
        if (TWO) b[r][v] = splat(0);
    }
    int e = 0;
    for (; TWO && e + 1 < count; e += 2) {
        vec s = splat(g[e]), t = splat(g[e + 1]);
        const float *p = x + patch[e], *q = x + patch[e + 1];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) {
            a[r][v] += s * load(p + r * x_row + 8 * v);
            b[r][v] += t * load(q + r * x_row + 8 * v);
        }
    }
    for (; e < count; e++) {
        vec s = splat(g[e]);
        const float *p = x + patch[e];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
            a[r][v] += s * load(p + r * x_row + 8 * v);
    }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
        store(d + r * d_row + 8 * v, TWO ? a[r][v] + b[r][v] : a[r][v]);
}

static void add_patches_any(int rows, int vecs, const float *g, const int32_t *patch, int count, const float *x,
                            long x_row, float *d, long d_row, int fresh) {
    switch (BLOCK_ID(rows, vecs)) {
#define X(R, V) case BLOCK_ID(R, V): add_patches(R, V, g, patch, count, x, x_row, d, d_row, fresh); break;
        BLOCKS(X)
#undef X
    }
}

typedef struct {
    int spots, words; /* places in the image, 64-bit words of a place's mask */
    int spots_a_window;
    const uint64_t *masks; /* [spot][words]: the channels with a gradient there */
    const int32_t *patch;  /* [spot] */
    const float *g;        /* [window][channel] */
    long g_step;
} Spots;

/* d[patch] += Σ over the channels of a spot of g · w[channel] */
INLINE void add_filters(const int ROWS, const int VECS, const Spots *s, const float *w, long w_channel, long w_row,
                        float *d, long d_row) {
    for (int j = 0; j < s->words; j++, w += 64 * w_channel) /* 64 filters at a time fit in the cache */
        for (int i = 0; i < s->spots; i++) {
            uint64_t m = s->masks[(long)i * s->words + j];
            if (!m) continue;
            const float *g = s->g + i / s->spots_a_window * s->g_step + 64 * j;
            vec a[5][ACCUMULATORS];
            UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) a[r][v] = splat(0);
            for (; m; m &= m - 1) {
                int c = __builtin_ctzll(m);
                vec value = splat(g[c]);
                const float *p = w + c * w_channel;
                UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
                    a[r][v] += value * load(p + r * w_row + 8 * v);
            }
            float *to = d + s->patch[i];
            UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
                store(to + r * d_row + 8 * v, load(to + r * d_row + 8 * v) + a[r][v]);
        }
}

static void add_filters_any(int rows, int vecs, const Spots *s, const float *w, long w_channel, long w_row, float *d,
                            long d_row) {
    switch (BLOCK_ID(rows, vecs)) {
#define X(R, V) case BLOCK_ID(R, V): add_filters(R, V, s, w, w_channel, w_row, d, d_row); break;
        BLOCKS(X)
#undef X
    }
}

/* The gradients of some images that are not zero, by channel: [channel][capacity] values, places of their patches */
typedef struct {
    float *value;
    int32_t *patch, *count;
    long capacity;
} Lists;

/* sums[e] += the products of patch e with a block of a filter, in eight parts */
INLINE void project(const int ROWS, const int VECS, const int32_t *patch, int count, const float *x, long x_row,
                    const float *w, long w_row, float *sums) {
    vec filter[5][ACCUMULATORS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) filter[r][v] = load(w + r * w_row + 8 * v);
    for (int e = 0; e < count; e++, sums += 8) {
        const float *p = x + patch[e];
        vec s = load(sums), t = splat(0);
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) {
            if ((r * VECS + v) % 2)
                t += load(p + r * x_row + 8 * v) * filter[r][v];
            else
                s += load(p + r * x_row + 8 * v) * filter[r][v];
        }
        store(sums, s + t);
    }
}

/* sums[e] += patch e · filter `channel`, where `rows` holds the filters in blocks */
void project_patches(const Layer *l, int channel, const int32_t *patch, int count, const float *x, const float *weight,
                     const float *packed, float *sums) {
    int part = 8 * l->block_vecs;
    long row = (long)l->in_w * l->in_c;
    for (int y = 0; y < l->kernel_h; y += l->block_rows)
        for (int p = 0; p < l->row_parts; p++) {
            int rows = smaller(l->block_rows, l->kernel_h - y);
            const float *from = x + y * row + p * part, *w = packed + (long)channel * rows * part;
            long w_row = part;
            if (l->exact) w_row = l->row_floats, w = weight + ((long)channel * l->kernel_h + y) * w_row + p * part;
            packed += (long)l->outputs * rows * part;
            switch (BLOCK_ID(rows, l->block_vecs)) {
#define X(R, V) case BLOCK_ID(R, V): project(R, V, patch, count, from, row, w, w_row, sums); break;
                BLOCKS(X)
#undef X
            }
        }
}

/* Append to the lists of eight channels the gradients of eight windows: a row of `block` is a channel. */
INLINE void append(const Chain *chain, const Layer *l, const Lists *lists, const vec block[8], int channel, int window,
                   int windows, int32_t shift, const uint8_t *argmax, const int32_t *offset) {
    int channels = smaller(8, l->outputs - channel);
#ifdef __AVX2__
    __m256i base = _mm256_add_epi32(_mm256_loadu_si256((const void *)(chain->window_in + window)), _mm256_set1_epi32(shift));
    __m256i table = _mm256_loadu_si256((const void *)offset);
    __m128i of[4];
    if (l->pool == 2) { /* transpose the bytes that say which of a window's four it is */
#define ROW(j) _mm_loadl_epi64((const void *)(argmax + (long)smaller(j, windows - 1) * l->map_c))
        __m128i a0 = _mm_unpacklo_epi8(ROW(0), ROW(1)), a1 = _mm_unpacklo_epi8(ROW(2), ROW(3));
        __m128i a2 = _mm_unpacklo_epi8(ROW(4), ROW(5)), a3 = _mm_unpacklo_epi8(ROW(6), ROW(7));
#undef ROW
        __m128i b0 = _mm_unpacklo_epi16(a0, a1), b1 = _mm_unpackhi_epi16(a0, a1);
        __m128i b2 = _mm_unpacklo_epi16(a2, a3), b3 = _mm_unpackhi_epi16(a2, a3);
        of[0] = _mm_unpacklo_epi32(b0, b2), of[1] = _mm_unpackhi_epi32(b0, b2);
        of[2] = _mm_unpacklo_epi32(b1, b3), of[3] = _mm_unpackhi_epi32(b1, b3);
    } else
        of[0] = of[1] = of[2] = of[3] = _mm_setzero_si128();
    UNROLL for (int q = 0; q < 8; q++) {
        if (q >= channels) break;
        unsigned there = lane_bits(block[q] != splat(0));
        __m256i which = _mm256_cvtepu8_epi32(q & 1 ? _mm_srli_si128(of[q / 2], 8) : of[q / 2]);
        __m256i patch = _mm256_add_epi32(base, _mm256_permutevar8x32_epi32(table, which));
        __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)chain->order[there]));
        int32_t *count = lists->count + channel + q;
        long to = (channel + q) * lists->capacity + *count;
        _mm256_storeu_ps(lists->value + to, _mm256_permutevar8x32_ps((__m256)block[q], order));
        _mm256_storeu_si256((void *)(lists->patch + to), _mm256_permutevar8x32_epi32(patch, order));
        *count += __builtin_popcount(there);
    }
#else
    for (int q = 0; q < channels; q++) {
        int count = lists->count[channel + q];
        long to = (channel + q) * lists->capacity;
        for (int j = 0; j < windows; j++) {
            int which = l->pool == 2 ? argmax[(long)j * l->map_c + q] : 0;
            lists->value[to + count] = block[q][j];
            lists->patch[to + count] = chain->window_in[window + j] + shift + offset[which];
            count += block[q][j] != 0;
        }
        lists->count[channel + q] = count;
    }
#endif
}

/* List one image's gradients by channel, patches counted from `shift`; add them to `bias_sum`; and, if `g` is given,
 * store them by window and position as well. */
static void list_gradients(const Chain *chain, const Layer *l, const Lists *lists, const float *out_grad, int image,
                           int32_t shift, float *bias_sum, float *g, uint8_t *masks, int mask_bytes) {
    int windows = l->map_h * l->map_w, step = l->map_c, places = l->pool * l->pool;
    int32_t offset[8] = {0};
    for (int q = 0; q < places; q++) offset[q] = (q / l->pool * l->in_w + q % l->pool) * l->in_c;
    long start = (long)image * l->out_h * l->out_w * step;
    const float *out = l->out + start, *grad = out_grad + start;
    const uint8_t *argmax = l->argmax + (long)image * windows * step;
    for (int t = 0; t < windows; t += 8) {
        int some = smaller(8, windows - t);
        for (int c = 0; c < step; c += 8) {
            vec block[8], total = load(bias_sum + c);
            ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7}, real = lanes + c < l->outputs; /* the others are padding */
            for (int j = 0; j < 8; j++) {
                block[j] = splat(0);
                if (j >= some) continue;
                int32_t at = chain->window_out[t + j] + c;
                block[j] = (vec)((ivec)load(grad + at) & real);
                if (l->relu) block[j] = pick(load(out + at) <= splat(0), splat(0), block[j]);
                total += block[j];
                if (!g) continue;
                store(g + (long)(t + j) * step + c, block[j]);
                ivec there = block[j] != splat(0);
                uint8_t *mask = masks + (long)(t + j) * places * mask_bytes + c / 8;
                if (places == 1)
                    *mask = (uint8_t)lane_bits(there);
                else {
                    ivec which = __builtin_convertvector(*(const bvec_at *)(argmax + (long)(t + j) * step + c), ivec), q = {0};
                    for (int k = 0; k < 4; k++, mask += mask_bytes, q += 1)
                        *mask = (uint8_t)lane_bits(there & (which == q));
                }
            }
            store(bias_sum + c, total);
            transpose(block);
            append(chain, l, lists, block, c, t, some, shift, argmax + (long)t * step + c, offset);
        }
    }
}

static Lists lists_of(const Chain *chain, const Layer *l, int group, long capacity) {
    long at = (long)group * l->outputs * capacity;
    return (Lists){chain->live + at, chain->patch + at, chain->live_count + (long)group * l->outputs, capacity};
}

/* The gradients of weights, bias (unless NULL) and input (unless NULL) from that of the output. With `add`, weights' and
 * input's gradients are added to what was computed last.
 *
 * Images are taken `span` at a time, and a block of the kernels' rows is applied to all of them before the next one,
 * since large kernels do not fit in the cache. Within a span, `group` images are listed together, as many as keep
 * their part of the input in the cache for all filters. */
void convolution_backward(Chain *chain, const Layer *l, int count, const float *out_grad, const float *in,
                          const float *weight, float *weight_grad, float *bias_grad, float *in_grad, int add) {
    int places = l->pool * l->pool, windows = l->map_h * l->map_w, part = 8 * l->block_vecs;
    int words = (l->outputs + 63) / 64, spots = windows * places;
    long image = (long)l->in_h * l->in_w * l->in_c, row = (long)l->in_w * l->in_c;
    long capacity = (long)l->group * windows + 8, g_image = (long)windows * l->map_c, mask_image = (long)spots * words;
    float *bias_sum = chain->scratch, *g = bias_sum + l->map_c;
    uint64_t *masks = (uint64_t *)(g + l->span * g_image);
    int32_t *spot_patch = (int32_t *)(masks + l->span * mask_image);
    float *d = l->exact ? weight_grad : l->rows_grad;
    long d_channel = (long)l->kernel_h * l->row_floats;

    memset(bias_sum, 0, sizeof(float) * (size_t)l->map_c);
    for (int t = 0; t < windows; t++) {
        int y = t / l->map_w, x = t % l->map_w;
        chain->window_in[t] = (y * l->in_w + x) * l->pool * l->in_c;
        chain->window_out[t] = ((y + l->out_border_h) * l->out_w + x + l->out_border_w) * l->map_c;
        for (int q = 0; q < places; q++)
            spot_patch[t * places + q] = chain->window_in[t] + (q / l->pool * l->in_w + q % l->pool) * l->in_c;
    }
    if (in_grad) {
        if (!add) memset(in_grad, 0, sizeof(float) * (size_t)(image * count));
        memset(masks, 0, sizeof(uint64_t) * (size_t)(l->span * mask_image));
        if (!l->exact) pack_rows(l, weight, l->rows);
    }
    for (int first = 0; first < count; first += l->span) {
        int some = smaller(l->span, count - first), groups = (some + l->group - 1) / l->group;
        memset(chain->live_count, 0, sizeof(int32_t) * (size_t)groups * (size_t)l->outputs);
        for (int i = 0; i < some; i++) {
            Lists lists = lists_of(chain, l, i / l->group, capacity);
            list_gradients(chain, l, &lists, out_grad, first + i, (int32_t)(i % l->group * image), bias_sum,
                           in_grad ? g + i * g_image : 0, (uint8_t *)(masks + i * mask_image), 8 * words);
        }
        const float *packed = l->rows;
        for (int y = 0; y < l->kernel_h; y += l->block_rows)
            for (int p = 0; p < l->row_parts; p++) {
                int rows = smaller(l->block_rows, l->kernel_h - y);
                long at = first * image + y * row + p * part, w_at = (long)y * l->row_floats + p * part;
                for (int i = 0; in_grad && i < some; i++) {
                    Spots here = {spots, words, places, masks + i * mask_image, spot_patch, g + i * g_image, l->map_c};
                    add_filters_any(rows, l->block_vecs, &here, l->exact ? weight + w_at : packed,
                                    l->exact ? d_channel : rows * part, l->exact ? l->row_floats : part,
                                    in_grad + at + i * image, row);
                }
                packed += (long)l->outputs * rows * part;
                for (int k = 0; k < groups; k++) {
                    Lists lists = lists_of(chain, l, k, capacity);
                    for (int c = 0; c < l->outputs; c++)
                        add_patches_any(rows, l->block_vecs, lists.value + c * capacity, lists.patch + c * capacity,
                                        lists.count[c], in + at + (long)k * l->group * image, row,
                                        d + c * d_channel + w_at, l->row_floats, !add && first == 0 && k == 0);
                }
            }
    }
    if (!l->exact) unpack_rows(l, weight_grad);
    if (bias_grad) memcpy(bias_grad, bias_sum, sizeof(float) * (size_t)l->outputs);
}
