/* What a small transformer spends its time on beside matrix products: attention over few tokens, GELU, layer
   norms, what lies between the products of a block, the update.

   Plain C with the vector extensions of GCC and Clang, no headers of torch: a second to compile. Everything is float32
   and contiguous. Work is split over `threads` by rows or heads that do not depend on each other, so no result depends
   on their number, but for the gradients of a whole block, whose sums over the batch are of larger parts then. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define W 16
#else
#define W 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias)); /* of no alignment */

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec splat(float x) { return (vec){0} + x; }
INLINE vec either(ivec where, vec a, vec b) { return (vec)(((ivec)a & where) | ((ivec)b & ~where)); }
INLINE vec larger(vec a, vec b) { return either(a > b, a, b); }
INLINE vec within(vec x, float limit) { /* NaN stays NaN */
  x = either(x > limit, splat(limit), x);
  return either(x < -limit, splat(-limit), x);
}
#if W == 16
#define FOLD(v, op) \
  v = op(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
  v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
  v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#else
#define FOLD(v, op) \
  v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3)); \
  v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5)); \
  v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6))
#endif
INLINE vec sum_of(vec a, vec b) { return a + b; }
INLINE float total(vec v) {
  FOLD(v, sum_of);
  return v[0];
}
INLINE float largest(vec v) {
  FOLD(v, larger);
  return v[0];
}

/* How many floats are worked on at once: heads are a multiple of it wide. */
int width(void) { return W; }

/* Whether `threads` has an effect. */
int parallel(void) {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

/* e^x by 2^n·e^r, |r| <= ln2/2, Taylor to r^7 (5e-9). Below -87 it is 0: denormal numbers cost a hundred cycles. */
INLINE vec vexp(vec x) {
  const vec shift = splat(12582912.0f); /* 1.5·2^23: adding it rounds to the nearest integer, in the low bits */
  const ivec gone = x < -87.0f;
  x = either(x > 88.0f, splat(88.0f), x); /* NaN stays NaN */
  vec n = x * 1.44269504088896341f + shift;
  ivec power = ((ivec)n + 127) << 23;
  n -= shift;
  vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f; /* ln2 in two parts, so that n·ln2 is exact enough */
  vec y = r * (1.0f / 5040) + (1.0f / 720);
  y = y * r + (1.0f / 120);
  y = y * r + (1.0f / 24);
  y = y * r + (1.0f / 6);
  y = y * r + 0.5f;
  y = y * (r * r) + (r + 1.0f);
  return (vec)((ivec)(y * (vec)power) & ~gone);
}

/* ------------------------------------------------------------------------------------------------- GELU */

/* x/2 + x·(Φ(x) - 1/2); the odd part is x·P(x²)/Q(x²) within 1e-8, and constant beyond |x| = 5.6. */
INLINE vec gelu(vec x) {
  vec c = within(x, 5.6f), u = c * c;
  vec p = u * 2.214552993e-08f + 6.356497976e-06f;
  p = p * u + 0.0001738470101f;
  p = p * u + 0.004707236261f;
  p = p * u + 0.03437574998f;
  p = p * u + 0.3989422216f;
  vec q = u * 1.1802159e-06f + 7.510069407e-05f;
  q = q * u + 0.001912956923f;
  q = q * u + 0.02893988019f;
  q = q * u + 0.2528329401f;
  q = q * u + 1.0f;
  return x * (c * p / q + 0.5f);
}

/* Φ(x) + x·φ(x) in the same form, within 5e-9. */
INLINE vec gelu_slope(vec x) {
  vec c = within(x, 6.0f), u = c * c;
  vec p = u * -2.887969917e-11f + 1.300262401e-08f;
  p = p * u + 1.121883229e-06f;
  p = p * u + 3.202720718e-05f;
  p = p * u + 0.0002852059124f;
  p = p * u + 0.01356905065f;
  p = p * u - 0.01803899871f;
  p = p * u + 0.7978845225f;
  vec q = u * 3.636211264e-07f + 1.081201799e-05f;
  q = q * u + 0.0002586016091f;
  q = q * u + 0.004150169603f;
  q = q * u + 0.04558245826f;
  q = q * u + 0.3107243183f;
  q = q * u + 1.0f;
  return c * p / q + 0.5f;
}

void gelu_forward(const float *x, float *y, int64_t n, int threads) {
  int64_t blocks = n / W;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < blocks; k++) store(y + k * W, gelu(load(x + k * W)));
  for (int64_t k = blocks * W; k < n; k++) y[k] = gelu(splat(x[k]))[0];
}

void gelu_backward(const float *g, const float *x, float *out, int64_t n, int threads) {
  int64_t blocks = n / W;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < blocks; k++) store(out + k * W, load(g + k * W) * gelu_slope(load(x + k * W)));
  for (int64_t k = blocks * W; k < n; k++) out[k] = g[k] * gelu_slope(splat(x[k]))[0];
}

/* -------------------------------------------------------------------------------------- small products */

/* A tile of C = A·B: `rows` rows of `cols` vectors. A's element (i, k) is at a[i·ai + k·ak], so A may be transposed. */
INLINE void tile(int rows, int cols, int K, const float *a, int ai, int ak, const float *b, int ldb, float *c, int ldc) {
  vec sum[6][2];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++) sum[i][j] = (vec){0};
  for (int k = 0; k < K; k++) {
    vec row[2];
    for (int j = 0; j < cols; j++) row[j] = load(b + k * ldb + j * W);
    for (int i = 0; i < rows; i++) {
      float left = a[i * ai + k * ak];
      for (int j = 0; j < cols; j++) sum[i][j] += left * row[j];
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++) store(c + i * ldc + j * W, sum[i][j]);
}

INLINE void strip(int cols, int M, int K, const float *a, int ai, int ak, const float *b, int ldb, float *c, int ldc) {
  int i = 0;
  for (; i + 6 <= M; i += 6) tile(6, cols, K, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc);
  a += i * ai, c += i * ldc;
  switch (M - i) {
    case 5: tile(5, cols, K, a, ai, ak, b, ldb, c, ldc); break;
    case 4: tile(4, cols, K, a, ai, ak, b, ldb, c, ldc); break;
    case 3: tile(3, cols, K, a, ai, ak, b, ldb, c, ldc); break;
    case 2: tile(2, cols, K, a, ai, ak, b, ldb, c, ldc); break;
    case 1: tile(1, cols, K, a, ai, ak, b, ldb, c, ldc); break;
  }
}

/* C (M, N) = A (M, K)·B (K, N); N is a multiple of W. */
static void product(int M, int N, int K, const float *a, int ai, int ak, const float *b, int ldb, float *c, int ldc) {
  int j = 0;
  for (; j + 2 * W <= N; j += 2 * W) strip(2, M, K, a, ai, ak, b + j, ldb, c + j, ldc);
  if (j < N) strip(1, M, K, a, ai, ak, b + j, ldb, c + j, ldc);
}

/* The rows of a head, together; those of the next one are asked for meanwhile. */
static void gather(int L, int d, const float *from, int stride, float *to) {
  for (int i = 0; i < L; i++, from += stride, to += d) {
    for (int c = 0; c < d; c += W) store(to + c, load(from + c));
    for (int c = 0; c < d; c += 16) __builtin_prefetch(from + d + c);
  }
}

static void scatter(int L, int d, const float *from, float *to, int stride) {
  for (int i = 0; i < L; i++, from += d, to += stride)
    for (int c = 0; c < d; c += W) store(to + c, load(from + c));
}

/* (L, d) -> (d, P), zeros behind L; in squares, so that no line is met again after it has gone. */
static void transpose(int L, int P, int d, const float *from, float *to) {
  for (int i = 0; i < P; i += W)
    for (int c = 0; c < d; c += W) {
      const int rows = L - i < W ? L - i : W;
      float square[W][W] = {{0}};
      for (int k = 0; k < rows; k++)
        for (int j = 0; j < W; j++) square[j][k] = from[(i + k) * d + c + j];
      for (int j = 0; j < W; j++) store(to + (c + j) * P + i, load(square[j]));
    }
}

/* -------------------------------------------------------------------------------------------- attention */

/* softmax(q·kᵀ/√d)·v of every head. qkv (B, L, 3, H, d), out (B, L, H, d); logs (B, H, L) takes each row's
   log-sum-exp for the backward pass. d is a multiple of W. */
void attention_forward(const float *qkv, float *out, float *logs, int B, int L, int H, int d, int threads) {
  const int P = (L + W - 1) / W * W, D = H * d;
  const float scale = 1.0f / sqrtf((float)d);
  ivec behind; /* which of a row's last W lie behind L */
  for (int j = 0; j < W; j++) behind[j] = P - W + j >= L ? -1 : 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float *room = aligned_alloc(64, (sizeof(float) * ((size_t)4 * L * d + (size_t)d * P + (size_t)L * P) + 63) / 64 * 64);
    float *q = room, *k = q + L * d, *v = k + L * d, *o = v + L * d, *kt = o + L * d, *s = kt + d * P;
#pragma omp for
    for (int64_t n = 0; n < (int64_t)B * H; n++) {
      const float *head = qkv + (n / H) * L * 3 * D + (n % H) * d;
      gather(L, d, head, 3 * D, q);
      gather(L, d, head + D, 3 * D, k);
      gather(L, d, head + 2 * D, 3 * D, v);
      transpose(L, P, d, k, kt);
      product(L, P, d, q, d, 1, kt, P, s, P);
      for (int i = 0; i < L; i++) {
        float *row = s + i * P;
        vec last = either(behind, splat(-1e30f), load(row + P - W)), most = last, sum;
        for (int j = 0; j < P - W; j += W) most = larger(most, load(row + j));
        const float top = largest(most);
        sum = vexp((last - top) * scale);
        store(row + P - W, sum);
        for (int j = 0; j < P - W; j += W) {
          vec e = vexp((load(row + j) - top) * scale);
          store(row + j, e);
          sum += e;
        }
        float whole = total(sum);
        logs[n * L + i] = top * scale + logf(whole);
        float part = 1.0f / whole;
        for (int j = 0; j < P; j += W) store(row + j, load(row + j) * part);
      }
      product(L, d, L, s, P, 1, v, d, o, d);
      scatter(L, d, o, out + (n / H) * L * D + (n % H) * d, D);
    }
    free(room);
  }
}

/* The gradient of qkv from g, that of `out`. The probabilities are worked out again rather than kept:
   P = exp(q·kᵀ/√d - logs), dv = Pᵀg, dS = P·(g·vᵀ - Σ g·out)/√d, dq = dS·k, dk = dSᵀq. */
void attention_backward(
    const float *g, const float *qkv, const float *out, const float *logs, float *dqkv, int B, int L, int H, int d, int threads
) {
  const int P = (L + W - 1) / W * W, D = H * d;
  const float scale = 1.0f / sqrtf((float)d);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    size_t floats = (size_t)6 * L * d + (size_t)d * P + (size_t)2 * L * P;
    float *room = aligned_alloc(64, (sizeof(float) * floats + 63) / 64 * 64);
    float *q = room, *k = q + L * d, *v = k + L * d, *go = v + L * d, *o = go + L * d, *grad = o + L * d;
    float *turned = grad + L * d, *p = turned + d * P, *s = p + L * P;
#pragma omp for
    for (int64_t n = 0; n < (int64_t)B * H; n++) {
      const int64_t place = (n / H) * L * 3 * D + (n % H) * d, one = (n / H) * L * D + (n % H) * d;
      float *to = dqkv + place;
      gather(L, d, qkv + place, 3 * D, q);
      gather(L, d, qkv + place + D, 3 * D, k);
      gather(L, d, qkv + place + 2 * D, 3 * D, v);
      gather(L, d, g + one, D, go);
      gather(L, d, out + one, D, o);
      transpose(L, P, d, k, turned);
      product(L, P, d, q, d, 1, turned, P, p, P);
      transpose(L, P, d, v, turned);
      product(L, P, d, go, d, 1, turned, P, s, P);
      for (int i = 0; i < L; i++) {
        vec sum = {0};
        for (int c = 0; c < d; c += W) sum += load(go + i * d + c) * load(o + i * d + c);
        float mean = total(sum), log = logs[n * L + i];
        float *row = p + i * P, *slope = s + i * P;
        for (int j = 0; j < P; j += W) {
          vec e = vexp(load(row + j) * scale - log);
          store(row + j, e);
          store(slope + j, e * (load(slope + j) - mean) * scale);
        }
      }
      product(L, d, L, s, P, 1, k, d, grad, d);
      scatter(L, d, grad, to, 3 * D);
      product(L, d, L, s, 1, P, q, d, grad, d);
      scatter(L, d, grad, to + D, 3 * D);
      product(L, d, L, p, 1, P, go, d, grad, d);
      scatter(L, d, grad, to + 2 * D, 3 * D);
    }
    free(room);
  }
}

/* ------------------------------------------------------------------------------------------ layer norms */

#define CLOSE 640 /* rows of a block that are worked on together, a thread; measured between 128 and 2,048 */
#define ROWS 128 /* sums over rows are of so many at a time, whatever the threads, then of those sums */

INLINE int64_t parts(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

/* out = Σ over the parts, of n numbers each, or more than it was. */
static void fold(const float *part, int64_t count, int64_t n, float *out, int more) {
  if (!more) memcpy(out, part, sizeof(float) * n);
  for (int64_t p = !more; p < count; p++)
    for (int64_t c = 0; c < n; c++) out[c] += part[p * n + c];
}

/* out = Σ over the rows of g (R, n), or more by it. */
static void columns(const float *g, int64_t R, int64_t n, float *out, int more, float *room, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < parts(R); p++) {
    const int64_t end = (p + 1) * ROWS < R ? (p + 1) * ROWS : R;
    float *sum = room + p * n;
    memcpy(sum, g + p * ROWS * n, sizeof(float) * n);
    for (int64_t r = p * ROWS + 1; r < end; r++)
      for (int64_t c = 0; c < n; c++) sum[c] += g[r * n + c];
  }
  fold(room, parts(R), n, out, more);
}

/* y = (x - mean)·rstd·w + b of every row; with `known`, by the statistics that are there. D is a multiple of W. */
static void layer_norm(
    const float *x, const float *w, const float *b, float *y, float *means, float *rstds, int known,
    int64_t R, int64_t D, float eps, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < R; r++) {
    const float *row = x + r * D;
    if (!known) {
      vec sum = {0}, squares = {0};
      for (int64_t c = 0; c < D; c += W) sum += load(row + c);
      const float mean = total(sum) / D;
      for (int64_t c = 0; c < D; c += W) {
        vec apart = load(row + c) - mean;
        squares += apart * apart;
      }
      means[r] = mean;
      rstds[r] = 1.0f / sqrtf(total(squares) / D + eps);
    }
    const float mean = means[r], rstd = rstds[r];
    for (int64_t c = 0; c < D; c += W) store(y + r * D + c, (load(row + c) - mean) * rstd * load(w + c) + load(b + c));
  }
}

/* dx = the gradient of x from g, that of y, plus `add`; dw and db (or more of them) where they are asked for.
   room: 2·parts(R)·D. */
static void layer_norm_backward(
    const float *g, const float *x, const float *w, const float *means, const float *rstds, const float *add,
    float *dx, float *dw, float *db, int more, int64_t R, int64_t D, float *room, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < parts(R); p++) {
    const int64_t end = (p + 1) * ROWS < R ? (p + 1) * ROWS : R;
    float *pw = room + p * D, *pb = room + (parts(R) + p) * D;
    memset(pw, 0, sizeof(float) * D);
    memset(pb, 0, sizeof(float) * D);
    for (int64_t r = p * ROWS; r < end; r++) {
      const float mean = means[r], rstd = rstds[r];
      vec whole = {0}, along = {0};
      for (int64_t c = 0; c < D; c += W) {
        vec gv = load(g + r * D + c), hat = (load(x + r * D + c) - mean) * rstd, pulled = gv * load(w + c);
        whole += pulled;
        along += pulled * hat;
        store(pw + c, load(pw + c) + gv * hat);
        store(pb + c, load(pb + c) + gv);
      }
      const float c1 = total(along) / D, c2 = total(whole) / D;
      for (int64_t c = 0; c < D; c += W) {
        vec hat = (load(x + r * D + c) - mean) * rstd, pulled = load(g + r * D + c) * load(w + c);
        store(dx + r * D + c, (pulled - c2 - hat * c1) * rstd + load(add + r * D + c));
      }
    }
  }
  if (dw) fold(room, parts(R), D, dw, more);
  if (db) fold(room + parts(R) * D, parts(R), D, db, more);
}

/* -------------------------------------------------------------------------------------- a whole block

   y = x + proj(attention(qkv(norm1(x)))),   z = y + fc2(GELU(fc1(norm2(y)))),   R = B·L rows of D numbers.

   Matrix products are those of the library that torch has, which is given once. */

typedef void product_f(
    const char *, const char *, const int64_t *, const int64_t *, const int64_t *, const float *, const float *,
    const int64_t *, const float *, const int64_t *, const float *, float *, const int64_t *
);
static product_f *sgemm; /* Fortran's: by columns; its whole numbers may have four bytes or eight */

void use_sgemm(void *function) { sgemm = (product_f *)function; }

/* c (m, n) = a (m, k)·wᵀ + beta·c, for w (n, k). */
static void forwards(int64_t m, int64_t n, int64_t k, const float *a, const float *w, float beta, float *c) {
  const float one = 1;
  sgemm("T", "N", &n, &m, &k, &one, w, &k, a, &k, &beta, c, &n);
}

/* da (m, k) = g (m, n)·w. */
static void backwards(int64_t m, int64_t n, int64_t k, const float *g, const float *w, float *da) {
  const float one = 1, zero = 0;
  sgemm("N", "N", &k, &m, &n, &one, w, &k, g, &n, &zero, da, &k);
}

/* dw (n, k) = gᵀ·a and db (n), or more of them, where they are asked for. */
static void slopes(
    int64_t m, int64_t n, int64_t k, const float *g, const float *a, float *dw, float *db, int more, float *room,
    int threads
) {
  const float one = 1, before = more;
  if (dw) sgemm("N", "T", &k, &n, &m, &one, a, &k, g, &n, &before, dw, &k);
  if (db) columns(g, m, n, db, more, room, threads);
}

/* Every row of `to` (R, n) = the bias, plus that of `add` where there is one. */
static void start(const float *bias, const float *add, float *to, int64_t R, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < R; r++)
    if (add)
      for (int64_t c = 0; c < n; c++) to[r * n + c] = add[r * n + c] + bias[c];
    else
      memcpy(to + r * n, bias, sizeof(float) * n);
}

/* What the forward pass keeps for the backward pass, in one piece; and where in it the rows from `row` on are. */
typedef struct {
  float *normed1, *qkv, *attended, *y, *inner, *active, *logs, *mean1, *rstd1, *mean2, *rstd2, *end;
} kept_t;

static kept_t pieces(float *at, int64_t R, int64_t row, int64_t D, int64_t hidden, int64_t heads) {
  kept_t k;
  k.normed1 = at + row * D, at += R * D;
  k.qkv = at + row * 3 * D, at += R * 3 * D;
  k.attended = at + row * D, at += R * D;
  k.y = at + row * D, at += R * D;
  k.inner = at + row * hidden, at += R * hidden;
  k.active = at + row * hidden, at += R * hidden;
  k.logs = at + row * heads, at += R * heads;
  k.mean1 = at + row, at += R;
  k.rstd1 = at + row, at += R;
  k.mean2 = at + row, at += R;
  k.rstd2 = at + row, at += R;
  k.end = at;
  return k;
}

/* The same where nothing is kept: rows take the place of those before them, and results of what is not needed any more. */
static kept_t passing(float *at, int64_t R, int64_t D, int64_t hidden, int64_t heads) {
  kept_t k;
  k.normed1 = k.attended = at, at += R * D;
  k.qkv = k.inner = k.active = at, at += R * (hidden > 3 * D ? hidden : 3 * D);
  k.y = at, at += R * D;
  k.logs = at, at += R * heads;
  k.mean1 = k.mean2 = at, at += R;
  k.rstd1 = k.rstd2 = at, at += R;
  k.end = at;
  return k;
}

/* Samples that are worked on at a time: what one part of the block writes is in the cache when the next reads it. */
static int samples_at_once(int B, int L, int threads) {
  const int64_t most = (int64_t)CLOSE * threads, parts = ((int64_t)B * L + most - 1) / most;
  return parts < B ? (int)((B + parts - 1) / parts) : 1;
}

/* Numbers that the forward pass needs room for, those that it keeps for the backward pass or those on its way. */
int64_t block_keeps(int B, int L, int64_t D, int64_t hidden, int64_t heads, int keep, int threads) {
  float *none = NULL;
  if (keep) return pieces(none, (int64_t)B * L, 0, D, hidden, heads).end - none;
  return passing(none, (int64_t)samples_at_once(B, L, threads) * L, D, hidden, heads).end - none;
}

int64_t block_room(int B, int L, int64_t D, int64_t hidden, int threads) {
  const int64_t R = (int64_t)samples_at_once(B, L, threads) * L;
  return R * (hidden + 6 * D) + parts(R) * (hidden > 3 * D ? hidden : 3 * D);
}

/* p: weight and bias of norm1, qkv, proj, norm2, fc1, fc2; only that of qkv may be missing. */
void block_forward(
    const float *x, const float *const *p, float *kept, float *z, int B, int L, int D_, int hidden_, int heads,
    float eps1, float eps2, int keep, int threads
) {
  const int64_t D = D_, hidden = hidden_;
  const int step = samples_at_once(B, L, threads);
  for (int first = 0; first < B; first += step) {
    const int n = B - first < step ? B - first : step;
    const int64_t row = (int64_t)first * L, R = (int64_t)n * L;
    const kept_t k = keep ? pieces(kept, (int64_t)B * L, row, D, hidden, heads) : passing(kept, R, D, hidden, heads);
    const float *in = x + row * D;
    float *out = z + row * D;
    layer_norm(in, p[0], p[1], k.normed1, k.mean1, k.rstd1, 0, R, D, eps1, threads);
    if (p[3]) start(p[3], NULL, k.qkv, R, 3 * D, threads);
    forwards(R, 3 * D, D, k.normed1, p[2], p[3] ? 1 : 0, k.qkv);
    attention_forward(k.qkv, k.attended, k.logs, n, L, heads, D / heads, threads);
    start(p[5], in, k.y, R, D, threads);
    forwards(R, D, D, k.attended, p[4], 1, k.y);
    layer_norm(k.y, p[6], p[7], out, k.mean2, k.rstd2, 0, R, D, eps2, threads); /* out has room until it is written */
    start(p[9], NULL, k.inner, R, hidden, threads);
    forwards(R, hidden, D, out, p[8], 1, k.inner);
    gelu_forward(k.inner, k.active, R * hidden, threads);
    start(p[11], k.y, out, R, D, threads);
    forwards(R, D, hidden, k.active, p[10], 1, out);
  }
}

/* g: the gradient of z. d: where those of the parameters go, or NULL. */
void block_backward(
    const float *g, const float *x, const float *const *p, float *kept, float *room, float *dx, float *const *d,
    int B, int L, int D_, int hidden_, int heads, int threads
) {
  const int64_t D = D_, hidden = hidden_;
  const int step = samples_at_once(B, L, threads);
  for (int first = 0; first < B; first += step) {
    const int n = B - first < step ? B - first : step, more = first > 0;
    const int64_t row = (int64_t)first * L, R = (int64_t)n * L;
    const kept_t k = pieces(kept, (int64_t)B * L, row, D, hidden, heads);
    const float *from = g + row * D;
    float *back = room, *normed2 = back + R * hidden, *pulled = normed2 + R * D, *dy = pulled + R * D;
    float *dqkv = dy + R * D, *aside = dqkv + 3 * R * D;
    slopes(R, D, hidden, from, k.active, d[10], d[11], more, aside, threads);
    backwards(R, D, hidden, from, p[10], back);
    gelu_backward(back, k.inner, back, R * hidden, threads);
    if (d[8]) layer_norm(k.y, p[6], p[7], normed2, k.mean2, k.rstd2, 1, R, D, 0, threads);
    slopes(R, hidden, D, back, normed2, d[8], d[9], more, aside, threads);
    backwards(R, hidden, D, back, p[8], pulled);
    layer_norm_backward(pulled, k.y, p[6], k.mean2, k.rstd2, from, dy, d[6], d[7], more, R, D, aside, threads);
    slopes(R, D, D, dy, k.attended, d[4], d[5], more, aside, threads);
    backwards(R, D, D, dy, p[4], pulled);
    attention_backward(pulled, k.qkv, k.attended, k.logs, dqkv, n, L, heads, D / heads, threads);
    slopes(R, 3 * D, D, dqkv, k.normed1, d[2], d[3], more, aside, threads);
    backwards(R, 3 * D, D, dqkv, p[2], pulled);
    layer_norm_backward(
        pulled, x + row * D, p[0], k.mean1, k.rstd1, dy, dx + row * D, d[0], d[1], more, R, D, aside, threads
    );
  }
}

/* ------------------------------------------------------------------------------------------- the update */

/* Σ of the squares of some numbers, less y where there is one. */
static double sum_of_squares(int64_t n, const float *x, const float *y) {
  double sum = 0;
  for (int64_t start = 0; start < n; start += 4096) {
    int64_t end = start + 4096 < n ? start + 4096 : n, k = start;
    vec part[4] = {{0}, {0}, {0}, {0}};
    for (; k + 4 * W <= end; k += 4 * W)
      for (int j = 0; j < 4; j++) {
        vec value = load(x + k + j * W);
        if (y) value -= load(y + k + j * W);
        part[j] += value * value;
      }
    float rest = 0;
    for (; k < end; k++) {
      float value = y ? x[k] - y[k] : x[k];
      rest += value * value;
    }
    sum += (double)total(part[0] + part[1] + part[2] + part[3]) + rest;
  }
  return sum;
}

/* each = Σ x², or Σ (x - y)² where there is a y, of every tensor in double, and then others = Σ y²; the sum of each. */
double squares(int tensors, const int64_t *sizes, float *const *x, float *const *y, double *each, double *others) {
  double whole = 0;
  for (int t = 0; t < tensors; t++) {
    each[t] = sum_of_squares(sizes[t], x[t], y ? y[t] : NULL);
    if (y) others[t] = sum_of_squares(sizes[t], y[t], NULL);
    whole += each[t];
  }
  return whole;
}

/* x *= factor */
void scale(int tensors, const int64_t *sizes, float *const *x, float factor) {
  for (int t = 0; t < tensors; t++)
    for (int64_t k = 0; k < sizes[t]; k++) x[t][k] *= factor;
}

/* mean += weight·(x - mean) */
void average(int tensors, const int64_t *sizes, float *const *mean, float *const *x, float weight) {
  for (int t = 0; t < tensors; t++)
    for (int64_t k = 0; k < sizes[t]; k++) mean[t][k] += weight * (x[t][k] - mean[t][k]);
}

/* AdamW. keep = 1 - lr·weight_decay, rate = lr/(1 - beta1^n), spread = √(1 - beta2^n). */
void adamw(
    int tensors, const int64_t *sizes, float *const *x, float *const *g, float *const *m, float *const *v,
    float keep, float rate, float spread, float beta1, float beta2, float eps
) {
  const float fresh1 = 1 - beta1, fresh2 = 1 - beta2, wide = 1 / spread;
  for (int t = 0; t < tensors; t++) {
    float *restrict xt = x[t], *restrict mt = m[t], *restrict vt = v[t];
    const float *restrict gt = g[t];
    for (int64_t k = 0; k < sizes[t]; k++) {
      mt[k] += fresh1 * (gt[k] - mt[k]);
      vt[k] = beta2 * vt[k] + fresh2 * gt[k] * gt[k];
      xt[k] = xt[k] * keep - rate * mt[k] / (sqrtf(vt[k]) * wide + eps);
    }
  }
}
