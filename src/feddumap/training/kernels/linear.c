/* Linear layers, forward and backward, and the conversion between feature maps and features. */
#include "chain.h"

/* torch flattens channel by channel: [image][place][channel] to [image][channel · places] */
void flatten(const Layer *c, const Layer *l, int count, const float *from, float *to) {
    int places = c->map_h * c->map_w;
    for (int i = 0; i < count; i++)
        transpose_block(from + (long)i * places * c->map_c, places, c->outputs, c->map_c, to + (long)i * l->in_step, places);
}

void unflatten(const Layer *c, const Layer *l, int count, const float *from, float *to) {
    int places = c->map_h * c->map_w;
    for (int i = 0; i < count; i++)
        transpose_block(from + (long)i * l->in_step, c->outputs, places, places, to + (long)i * places * c->map_c, c->map_c);
}

/* SAMPLES samples times OUTPUTS outputs */
INLINE void dots(const int SAMPLES, const int OUTPUTS, const float *x, long x_step, const float *w, int size,
                 const float *bias, float *out, long out_step, int with_relu) {
    vec acc[5][2];
    UNROLL for (int i = 0; i < SAMPLES; i++) UNROLL for (int o = 0; o < OUTPUTS; o++) acc[i][o] = splat(0);
    int k = 0;
    for (; k + 8 <= size; k += 8) {
        vec weight[2];
        UNROLL for (int o = 0; o < OUTPUTS; o++) weight[o] = load(w + (long)o * size + k);
        UNROLL for (int i = 0; i < SAMPLES; i++) {
            vec value = load(x + i * x_step + k);
            UNROLL for (int o = 0; o < OUTPUTS; o++) acc[i][o] += value * weight[o];
        }
    }
    UNROLL for (int i = 0; i < SAMPLES; i++) UNROLL for (int o = 0; o < OUTPUTS; o++) {
        float s = sum(acc[i][o]);
        for (int t = k; t < size; t++) s += x[i * x_step + t] * w[(long)o * size + t];
        s += bias[o];
        out[i * out_step + o] = with_relu && s < 0 ? 0 : s;
    }
}

void linear_forward(const Layer *l, int count, const float *weight, const float *bias, const float *in, float *out,
                    int with_relu) {
    for (int o = 0; o < l->outputs; o += 2)
        for (int i = 0; i < count; i += 5) {
            const float *x = in + (long)i * l->in_step, *w = weight + (long)o * l->inputs;
            float *to = out + (long)i * l->out_step + o;
            switch (smaller(5, count - i) * 2 + (o + 1 < l->outputs)) {
#define CASE(N) \
    case 2 * N: dots(N, 1, x, l->in_step, w, l->inputs, bias + o, to, l->out_step, with_relu); break; \
    case 2 * N + 1: dots(N, 2, x, l->in_step, w, l->inputs, bias + o, to, l->out_step, with_relu); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#undef CASE
            }
        }
}

/* d[sample] = Σ_o g[sample][o] · w[o], VECS vectors of it */
INLINE void to_inputs(const int SAMPLES, const int VECS, const float *g, long g_step, int outputs, const float *w,
                      long w_step, float *d, long d_step) {
    vec acc[5][2];
    UNROLL for (int i = 0; i < SAMPLES; i++) UNROLL for (int v = 0; v < VECS; v++) acc[i][v] = splat(0);
    for (int o = 0; o < outputs; o++) {
        vec weight[2];
        UNROLL for (int v = 0; v < VECS; v++) weight[v] = load(w + o * w_step + 8 * v);
        UNROLL for (int i = 0; i < SAMPLES; i++) {
            vec value = splat(g[i * g_step + o]);
            UNROLL for (int v = 0; v < VECS; v++) acc[i][v] += value * weight[v];
        }
    }
    UNROLL for (int i = 0; i < SAMPLES; i++) UNROLL for (int v = 0; v < VECS; v++) store(d + i * d_step + 8 * v, acc[i][v]);
}

/* dw[o] (+)= Σ_i g[i][o] · x[i], VECS vectors of it */
INLINE void to_weights(const int OUTPUTS, const int VECS, int count, const float *g, long g_step, const float *x,
                       long x_step, float *dw, long dw_step, int add) {
    vec acc[2][4];
    UNROLL for (int o = 0; o < OUTPUTS; o++) UNROLL for (int v = 0; v < VECS; v++)
        acc[o][v] = add ? load(dw + o * dw_step + 8 * v) : splat(0);
    for (int i = 0; i < count; i++) {
        vec value[2];
        UNROLL for (int o = 0; o < OUTPUTS; o++) value[o] = splat(g[i * g_step + o]);
        UNROLL for (int v = 0; v < VECS; v++) {
            vec input = load(x + i * x_step + 8 * v);
            UNROLL for (int o = 0; o < OUTPUTS; o++) acc[o][v] += value[o] * input;
        }
    }
    UNROLL for (int o = 0; o < OUTPUTS; o++) UNROLL for (int v = 0; v < VECS; v++)
        store(dw + o * dw_step + 8 * v, acc[o][v]);
}

/* The gradient is zero where the output of ReLU is zero. */
void relu_backward(const Layer *l, int count, float *grad) {
    for (int i = 0; l->relu && i < count; i++)
        for (int o = 0; o < l->outputs; o++)
            if (l->out[(long)i * l->out_step + o] <= 0) grad[(long)i * l->out_step + o] = 0;
}

void linear_weight_grad(const Layer *l, int count, const float *grad, const float *in, float *weight_grad, int add) {
    int size = l->inputs;
    for (int o = 0; o < l->outputs; o += 2) {
        const float *g = grad + o;
        float *to = weight_grad + (long)o * size;
        int k = 0, two = o + 1 < l->outputs;
#define BLOCK(OUTPUTS, VECS) to_weights(OUTPUTS, VECS, count, g, l->out_step, in + k, l->in_step, to + k, size, add)
        for (; two && k + 32 <= size; k += 32) BLOCK(2, 4);
        for (; two && k + 8 <= size; k += 8) BLOCK(2, 1);
        for (; k + 32 <= size; k += 32) BLOCK(1, 4);
        for (; k + 8 <= size; k += 8) BLOCK(1, 1);
#undef BLOCK
        for (; k < size; k++)
            for (int q = 0; q <= two; q++) {
                float s = add ? to[(long)q * size + k] : 0;
                for (int i = 0; i < count; i++) s += g[(long)i * l->out_step + q] * in[(long)i * l->in_step + k];
                to[(long)q * size + k] = s;
            }
    }
}

void linear_bias_grad(const Layer *l, int count, const float *grad, float *bias_grad) {
    for (int o = 0; o < l->outputs; o++) {
        float s = 0;
        for (int i = 0; i < count; i++) s += grad[(long)i * l->out_step + o];
        bias_grad[o] = s;
    }
}

void linear_in_grad(const Layer *l, int count, const float *grad, const float *weight, float *in_grad) {
    int size = l->inputs;
    for (int i = 0; i < count; i += 5) {
        const float *g = grad + (long)i * l->out_step;
        float *d = in_grad + (long)i * l->in_step;
        int k = 0, samples = smaller(5, count - i);
#define BLOCK(N, VECS) to_inputs(N, VECS, g, l->out_step, l->outputs, weight + k, size, d + k, l->in_step)
#define CASE(N) \
    case N: \
        for (; k + 16 <= size; k += 16) BLOCK(N, 2); \
        for (; k + 8 <= size; k += 8) BLOCK(N, 1); \
        break;
        switch (samples) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) }
#undef CASE
#undef BLOCK
        for (; k < size; k++)
            for (int q = 0; q < samples; q++) {
                float s = 0;
                for (int o = 0; o < l->outputs; o++) s += g[(long)q * l->out_step + o] * weight[(long)o * size + k];
                d[(long)q * l->in_step + k] = s;
            }
    }
}
