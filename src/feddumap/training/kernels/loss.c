/* Softmax cross-entropy. */
#include <math.h>

#include "chain.h"

/* p = softmax(z) into `p`, whose padding to whole vectors becomes zero (z and p may be the same); returns log Σ exp(z) */
static double softmax(const float *z, int classes, float *p) {
    float top = z[0], total = 0;
    for (int c = 1; c < classes; c++) top = z[c] > top || z[c] != z[c] ? z[c] : top;
    for (int c = 0; c < classes; c += 8) {
        vec x = splat(-1e30f);
        for (int j = 0; j < smaller(8, classes - c); j++) x[j] = z[c + j] - top;
        vec e = exp_negative(x);
        store(p + c, e);
        total += sum(e);
    }
    for (int c = 0; c < classes; c++) p[c] /= total;
    return log((double)total) + top;
}

/* out_grad = scale · (softmax(out + shift) − onehot(label)), without a shift if it is NULL; returns the sum of the samples'
 * losses */
double cross_entropy(const Layer *last, int count, const int64_t *labels, const float *shift, float scale) {
    double loss = 0;
    for (int i = 0; i < count; i++) {
        const float *z = last->out + (long)i * last->out_step;
        float *g = last->out_grad + (long)i * last->out_step;
        if (shift) {
            for (int c = 0; c < last->outputs; c++) g[c] = z[c] + shift[c];
            z = g;
        }
        float chosen = z[labels[i]];
        loss += softmax(z, last->outputs, g) - chosen;
        g[labels[i]] -= 1;
        for (int c = 0; c < last->outputs; c++) g[c] *= scale;
    }
    return loss;
}

/* The derivative of out_grad along out_tangent: scale · (p ∘ t − p (p · t)) */
void cross_entropy_tangent(const Layer *last, int count, float scale, float *p) {
    for (int i = 0; i < count; i++) {
        const float *t = last->out_tangent + (long)i * last->out_step;
        float *g = last->out_grad_tangent + (long)i * last->out_step, mean = 0;
        softmax(last->out + (long)i * last->out_step, last->outputs, p);
        for (int c = 0; c < last->outputs; c++) mean += p[c] * t[c];
        for (int c = 0; c < last->outputs; c++) g[c] = scale * p[c] * (t[c] - mean);
    }
}
