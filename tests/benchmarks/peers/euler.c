/* Euler–Maruyama for the covariance SDE of a shaped Transformer without a mask (Corollary 4.3), as one writes it by
   hand for speed: paths side by side in the innermost loops, which gcc vectorises, and blocks of paths on all threads.

   dV = [a1 (V T + (v sV + (v sV)')/2) + a2 nu(V)] dt + L E L' + (L E L')', with V = L L', K = L' H L, T = tr(K K)/m^2
   and E = sqrt(a/2) G1 + (kappa/m) G2 K; v = diag(V)/m, and s as in `sdeinfer.terms.attention_drift_vectors`.

   gcc -O3 -march=native -ffast-math -fopenmp -shared -fPIC euler.c -lm */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define B 16 /* paths of a block */
#define FOR for (int b = 0; b < B; b++)
#define V_(i, j) V[((i) * m + (j)) * B + b]

typedef struct { uint64_t s[B]; } Stream;

static void normals(Stream *stream, double *out, int count) {
    for (int k = 0; k < count; k += 2) FOR { /* splitmix64 and Box–Muller */
        uint64_t z = (stream->s[b] += 0x9E3779B97F4A7C15ull), w;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull, z = (z ^ (z >> 27)) * 0x94D049BB133111EBull, z ^= z >> 31;
        w = z * 0xD1342543DE82EF95ull + 1, w ^= w >> 29;
        double u = ((z >> 11) + 1.0) * 0x1p-53, angle = (w >> 11) * 0x1p-53 * 6.283185307179586;
        double radius = sqrt(-2 * log(u));
        out[k * B + b] = radius * cos(angle);
        if (k + 1 < count) out[(k + 1) * B + b] = radius * sin(angle);
    }
}

static void product(const double *X, const double *Y, double *Z, int m, int transposed) { /* Z = X Y or X Y' */
    for (int i = 0; i < m; i++) for (int j = 0; j < m; j++) {
        double sum[B] = {0};
        for (int k = 0; k < m; k++) {
            const double *x = X + (i * m + k) * B, *y = Y + (transposed ? j * m + k : k * m + j) * B;
            FOR sum[b] += x[b] * y[b];
        }
        memcpy(Z + (i * m + j) * B, sum, sizeof sum);
    }
}

static void step(double *V, double *work, Stream *stream, int m, double h, double a, double a1, double kappa, double a2) {
    int size = m * m * B;
    double *L = work, *C = L + size, *K = C + size, *G = K + size, *E = G + 2 * size, *W = E + size, *D = W + size;
    memset(L, 0, size * sizeof *L);
    for (int j = 0; j < m; j++) for (int i = j; i < m; i++) FOR { /* Cholesky, of what rounding leaves definite */
        double x = V_(i, j);
        for (int k = 0; k < j; k++) x -= L[(i * m + k) * B + b] * L[(j * m + k) * B + b];
        L[(i * m + j) * B + b] = i == j ? sqrt(x > 1e-300 ? x : 1e-300) : x / L[(j * m + j) * B + b];
    }
    for (int j = 0; j < m; j++) { /* C = H L */
        double mean[B] = {0};
        for (int i = 0; i < m; i++) FOR mean[b] += L[(i * m + j) * B + b] / m;
        for (int i = 0; i < m; i++) FOR C[(i * m + j) * B + b] = L[(i * m + j) * B + b] - mean[b];
    }
    for (int i = 0; i < m; i++) for (int j = 0; j < m; j++) { /* K = C' C */
        double sum[B] = {0};
        for (int k = 0; k < m; k++) FOR sum[b] += C[(k * m + i) * B + b] * C[(k * m + j) * B + b];
        memcpy(K + (i * m + j) * B, sum, sizeof sum);
    }
    double T[B] = {0}, grand[B] = {0}, norm[B] = {0}, row[64][B];
    for (int i = 0; i < m * m; i++) FOR T[b] += K[i * B + b] * K[i * B + b] / ((double)m * m);
    for (int i = 0; i < m; i++) {
        FOR row[i][b] = 0;
        for (int j = 0; j < m; j++) FOR row[i][b] += V_(i, j) / m;
        FOR grand[b] += row[i][b] / m, norm[b] += V_(i, i) / m;
    }
    for (int j = 0; j < m; j++) { /* sV, with one s for all rows */
        double sum[B] = {0};
        for (int k = 0; k < m; k++) FOR sum[b] += (V_(k, k) - 2 * row[k][b] - norm[b] + 2 * grand[b]) * V_(k, j);
        memcpy(D + j * B, sum, sizeof sum);
    }
    normals(stream, G, 2 * m * m);
    product(G + size, K, E, m, 0);
    double root = sqrt(a / 2 * h), mixing = kappa / m * sqrt(h);
    for (int i = 0; i < size; i++) E[i] = root * G[i] + mixing * E[i];
    product(L, E, W, m, 0), product(W, L, G, m, 1);
    for (int i = 0; i < m; i++) for (int j = 0; j <= i; j++) FOR {
        double rho = V_(i, j) / sqrt(V_(i, i) * V_(j, j)), inside = fmax(-1.0, fmin(1.0, rho));
        double relu = (rho * acos(inside) - sqrt(1 - inside * inside)) * sqrt(V_(i, i) * V_(j, j)) / -6.283185307179586;
        double attention = V_(i, j) * T[b] + (V_(i, i) * D[j * B + b] + V_(j, j) * D[i * B + b]) / (2 * m);
        W[(i * m + j) * B + b] = h * (a1 * attention + a2 * relu) + G[(i * m + j) * B + b] + G[(j * m + i) * B + b];
    }
    for (int i = 0; i < m; i++) for (int j = 0; j <= i; j++) FOR {
        double x = V_(i, j) + W[(i * m + j) * B + b];
        V_(i, j) = V_(j, i) = x;
    }
}

/* Ends of `blocks` × B paths from V0, shape (blocks, m, m, B). */
void solve(const double *V0, double *ends, int blocks, int m, int steps, double h, double a, double a1, double kappa,
           double a2, uint64_t seed) {
    int size = m * m * B;
#pragma omp parallel for schedule(static)
    for (int block = 0; block < blocks; block++) {
        double work[8 * size], *V = ends + (long)block * size;
        Stream stream;
        FOR stream.s[b] = (seed * 1000003ull + block * B + b) * 0xBF58476D1CE4E5B9ull;
        for (int i = 0; i < m * m; i++) FOR V[i * B + b] = V0[i];
        for (int k = 0; k < steps; k++) step(V, work, &stream, m, h, a, a1, kappa, a2);
    }
}
