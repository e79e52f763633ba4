/* A growing buffer, and msgpack written into it: what `RunWriter` writes with msgspec, without an object for each value. */
typedef struct {
    unsigned char *bytes;
    size_t used, room;
    int failed; /* out of memory: looked at once, at the end */
} Buffer;

static unsigned char *more_room(Buffer *b, size_t n) {
    if (b->room - b->used < n) {
        const size_t room = 2 * (b->used + n) + 1024;
        unsigned char *bytes = PyMem_Realloc(b->bytes, room);
        if (bytes == NULL) {
            b->failed = 1;
            return NULL;
        }
        b->bytes = bytes;
        b->room = room;
    }
    b->used += n;
    return b->bytes + b->used - n;
}

static void drop_buffer(Buffer *b) {
    PyMem_Free(b->bytes);
    memset(b, 0, sizeof *b);
}

static void put_bytes(Buffer *b, const void *from, size_t n) {
    unsigned char *to = more_room(b, n);
    if (to != NULL && n) memcpy(to, from, n);
}

static void put_byte(Buffer *b, unsigned byte) {
    unsigned char *to = more_room(b, 1);
    if (to != NULL) *to = (unsigned char)byte;
}

/* A mark and a number of `width` bytes, the greatest first. */
static void put_wide(Buffer *b, unsigned mark, uint64_t value, int width) {
    unsigned char *to = more_room(b, (size_t)width + 1);
    if (to == NULL) return;
    *to++ = (unsigned char)mark;
    while (width--) *to++ = (unsigned char)(value >> 8 * width);
}

static void put_number(Buffer *b, int64_t value) {
    if (value >= -32 && value < 128) put_byte(b, (unsigned char)value);
    else if (value >= 0 && value <= UINT32_MAX) put_wide(b, 0xce, (uint64_t)value, 4);
    else put_wide(b, 0xd3, (uint64_t)value, 8);
}

static void put_double(Buffer *b, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_wide(b, 0xcb, bits, 8);
}

static void put_array(Buffer *b, size_t n) {
    if (n < 16) put_byte(b, 0x90 | (unsigned)n);
    else put_wide(b, 0xdd, n, 4);
}

static void put_map(Buffer *b, size_t n) {
    if (n < 16) put_byte(b, 0x80 | (unsigned)n);
    else put_wide(b, 0xdf, n, 4);
}

static void put_text(Buffer *b, const char *text, size_t n) {
    if (n < 32) put_byte(b, 0xa0 | (unsigned)n);
    else put_wide(b, 0xdb, n, 4);
    put_bytes(b, text, n);
}

#define PUT_KEY(b, key) put_text(b, key, sizeof key - 1)

static void put_none(Buffer *b) { put_byte(b, 0xc0); }
static void put_bool(Buffer *b, int value) { put_byte(b, value ? 0xc3 : 0xc2); }

/* -1 with an error: a text that is no UTF-8, or no text. */
static int put_unicode(Buffer *b, PyObject *text) {
    Py_ssize_t n;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &n);
    if (utf8 == NULL) return -1;
    put_text(b, utf8, (size_t)n);
    return 0;
}

/* A mark and a number that is not negative, in decimal digits; how many characters that are. `to` has room for 21. */
static size_t put_digits(char *to, char mark, int64_t number) {
    char digits[20];
    size_t n = 0, used = 0;
    do digits[n++] = (char)('0' + number % 10);
    while (number /= 10);
    to[used++] = mark;
    while (n) to[used++] = digits[--n];
    return used;
}
