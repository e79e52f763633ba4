/* A call as it comes through the pipe, in msgpack, to its line of JSON: the bytes that msgspec makes of `model.event.Event`.
 *
 * Everything here returns 0, or -1 for what is not plain: a text that is not ASCII, a value that msgspec leaves out because
 * it is the default, a key that is unknown or not in its order. Such a frame is left to Python. Nothing has an effect beside
 * the buffers.
 */
#ifndef TENSORPROBE_JSON_H
#define TENSORPROBE_JSON_H

#include "_shortest.h"

#define DEEPEST 64

typedef struct {
    const unsigned char *at, *end;
} Reader;

typedef enum { NIL, NO, YES, WHOLE, REAL, TEXT, LIST, MAP } Type;

typedef struct {
    Type type;
    int64_t number;            /* of WHOLE */
    double real;               /* of REAL */
    const unsigned char *text; /* of TEXT */
    uint64_t length;           /* of TEXT in bytes, of LIST and MAP in entries */
} Value;

/* Where the figures of a tensor go into a line. */
typedef struct {
    size_t at;
    int64_t token;
} Hole;

typedef struct {
    Buffer line, holes;
} Draft;

static int read_bits(Reader *r, int width, uint64_t *bits) {
    if (r->end - r->at < width) return -1;
    for (*bits = 0; width; width--) *bits = *bits << 8 | *r->at++;
    return 0;
}

static int read_text(Reader *r, Value *v, uint64_t length) {
    if (length > (uint64_t)(r->end - r->at)) return -1;
    *v = (Value){.type = TEXT, .text = r->at, .length = length};
    r->at += length;
    return 0;
}

/* The next value; of a list or a map only how long it is. */
static int read_value(Reader *r, Value *v) {
    if (r->at >= r->end) return -1;
    const unsigned mark = *r->at++;
    uint64_t bits = 0;
    if (mark < 0x80 || mark >= 0xe0) return *v = (Value){.type = WHOLE, .number = (signed char)mark}, 0;
    if (mark < 0xa0) return *v = (Value){.type = mark < 0x90 ? MAP : LIST, .length = mark & 15}, 0;
    if (mark < 0xc0) return read_text(r, v, mark & 31);
    if (mark == 0xc0) return *v = (Value){.type = NIL}, 0;
    if (mark == 0xc2 || mark == 0xc3) return *v = (Value){.type = mark == 0xc3 ? YES : NO}, 0;
    if (mark == 0xcb) {
        if (read_bits(r, 8, &bits)) return -1;
        *v = (Value){.type = REAL};
        memcpy(&v->real, &bits, sizeof bits);
        return 0;
    }
    if (mark >= 0xcc && mark <= 0xcf) {
        if (read_bits(r, 1 << (mark - 0xcc), &bits) || bits > INT64_MAX) return -1;
        return *v = (Value){.type = WHOLE, .number = (int64_t)bits}, 0;
    }
    if (mark >= 0xd0 && mark <= 0xd3) {
        const int unused = 64 - (8 << (mark - 0xd0));
        if (read_bits(r, 1 << (mark - 0xd0), &bits)) return -1;
        return *v = (Value){.type = WHOLE, .number = (int64_t)(bits << unused) >> unused}, 0;
    }
    if (mark >= 0xd9 && mark <= 0xdb) return read_bits(r, 1 << (mark - 0xd9), &bits) ? -1 : read_text(r, v, bits);
    if (mark >= 0xdc) { /* 0xdc and 0xdd are lists, 0xde and 0xdf maps, with lengths of two and four bytes */
        if (read_bits(r, mark & 1 ? 4 : 2, &bits)) return -1;
        return *v = (Value){.type = mark < 0xde ? LIST : MAP, .length = bits}, 0;
    }
    return -1;
}

static int read_as(Reader *r, Type type, Value *v) { return read_value(r, v) || v->type != type ? -1 : 0; }

static int is_text(const Value *v, const char *text) {
    return v->length == strlen(text) && !memcmp(v->text, text, (size_t)v->length);
}

static void put_string(Buffer *b, const char *text) { put_bytes(b, text, strlen(text)); }

static void put_whole(Buffer *b, int64_t number) {
    char text[NUMBER_TEXT];
    const int sign = number < 0;
    text[0] = '-';
    put_bytes(b, text, (size_t)(sign + write_digits(text + sign, sign ? -(uint64_t)number : (uint64_t)number)));
}

static void put_real(Buffer *b, double number) {
    char text[NUMBER_TEXT];
    put_bytes(b, text, (size_t)write_double(text, number));
}

static int put_quoted(Buffer *b, const Value *v) {
    const unsigned char *plain = v->text, *end = v->text + v->length;
    put_byte(b, '"');
    for (const unsigned char *at = v->text; at < end; at++) {
        if (*at >= 0x80) return -1;
        if (*at >= 0x20 && *at != '"' && *at != '\\') continue;
        put_bytes(b, plain, (size_t)(at - plain));
        plain = at + 1;
        const char *const marks = "\"\\\b\f\n\r\t", *const found = *at ? strchr(marks, *at) : NULL;
        put_byte(b, '\\');
        if (found != NULL) {
            put_byte(b, (unsigned char)"\"\\bfnrt"[found - marks]);
        } else {
            put_string(b, *at < 0x10 ? "u000" : "u001");
            put_byte(b, (unsigned char)"0123456789abcdef"[*at & 15]);
        }
    }
    put_bytes(b, plain, (size_t)(end - plain));
    put_byte(b, '"');
    return 0;
}

static int put_json(Reader *r, Buffer *b, int depth);

static int put_entries(Reader *r, Buffer *b, const Value *v, int depth) {
    put_byte(b, v->type == LIST ? '[' : '{');
    for (uint64_t i = 0; i < v->length; i++) {
        Value key;
        if (i) put_byte(b, ',');
        if (v->type == MAP) {
            if (read_as(r, TEXT, &key) || put_quoted(b, &key)) return -1;
            put_byte(b, ':');
        }
        if (put_json(r, b, depth + 1)) return -1;
    }
    put_byte(b, v->type == LIST ? ']' : '}');
    return 0;
}

/* Any value: the tree of arguments. */
static int put_json(Reader *r, Buffer *b, int depth) {
    Value v;
    if (depth > DEEPEST || read_value(r, &v)) return -1;
    switch (v.type) {
    case NIL: return put_string(b, "null"), 0;
    case NO: return put_string(b, "false"), 0;
    case YES: return put_string(b, "true"), 0;
    case WHOLE: return put_whole(b, v.number), 0;
    case REAL: return v.real - v.real != 0 ? -1 : (put_real(b, v.real), 0);
    case TEXT: return put_quoted(b, &v);
    default: return put_entries(r, b, &v, depth);
    }
}

/* Lists of whole numbers, `levels` deep. */
static int put_wholes(Reader *r, Buffer *b, int levels) {
    Value v;
    if (!levels) return read_as(r, WHOLE, &v) ? -1 : (put_whole(b, v.number), 0);
    if (read_as(r, LIST, &v)) return -1;
    put_byte(b, '[');
    for (uint64_t i = 0; i < v.length; i++) {
        if (i) put_byte(b, ',');
        if (put_wholes(r, b, levels - 1)) return -1;
    }
    put_byte(b, ']');
    return 0;
}

/* What the value of a key may be. A value that equals the default of its field is never plain. */
typedef enum { ANY_TEXT, SOME_TEXT, LEVEL, DEVICE, ANY_WHOLE, SOME_WHOLE, WHOLES, PIECES_OF, TRUE_ONLY, TOKEN, TREE, SLOTS, LEFT_TO_PYTHON } Rule;
typedef struct {
    const char *key;
    Rule rule;
} Field;

/* The fields of `Event` and `SlotEvent`, in their order; the first `name`, and of a slot the first three, are always there. */
static const Field event_fields[] = {
    {"name", ANY_TEXT},     {"level", LEVEL},       {"module", SOME_TEXT}, {"parent", ANY_TEXT},      {"origin", ANY_TEXT},
    {"stack", ANY_WHOLE},   {"thread", SOME_WHOLE}, {"repeat", SOME_WHOLE}, {"phase", SOME_TEXT},     {"microbatch", ANY_WHOLE},
    {"raised", ANY_TEXT},   {"args", TREE},         {"kwargs", TREE},      {"slots", SLOTS},          {NULL, LEFT_TO_PYTHON},
};
static const Field slot_fields[] = {
    {"name", ANY_TEXT},  {"dtype", ANY_TEXT}, {"shape", WHOLES},     {"device", DEVICE},      {"stride", WHOLES}, {"grad", TRUE_ONLY},
    {"token", TOKEN},    {"skipped", ANY_TEXT}, {"written", PIECES_OF}, {"role", SOME_TEXT}, {NULL, LEFT_TO_PYTHON},
};

static int put_struct(Reader *r, Draft *d, const Field *fields, uint64_t demanded);

static int put_slots(Reader *r, Draft *d) {
    Value v;
    if (read_as(r, LIST, &v) || !v.length) return -1;
    for (uint64_t i = 0; i < v.length; i++) {
        put_byte(&d->line, i ? ',' : '[');
        if (put_struct(r, d, slot_fields, 3)) return -1;
    }
    put_byte(&d->line, ']');
    return 0;
}

static int put_field(Reader *r, Draft *d, Rule rule) {
    Buffer *b = &d->line;
    Value v;
    switch (rule) {
    case ANY_TEXT: return read_as(r, TEXT, &v) ? -1 : put_quoted(b, &v);
    case SOME_TEXT: return read_as(r, TEXT, &v) || !v.length ? -1 : put_quoted(b, &v);
    case DEVICE: return read_as(r, TEXT, &v) || is_text(&v, "cpu") ? -1 : put_quoted(b, &v);
    case LEVEL: return read_as(r, TEXT, &v) || !(is_text(&v, "module") || is_text(&v, "aten")) ? -1 : put_quoted(b, &v);
    case ANY_WHOLE: return put_wholes(r, b, 0);
    case SOME_WHOLE: return read_as(r, WHOLE, &v) || !v.number ? -1 : (put_whole(b, v.number), 0);
    case WHOLES: return put_wholes(r, b, 1);
    case PIECES_OF: return put_wholes(r, b, 2);
    case TRUE_ONLY: return read_as(r, YES, &v) ? -1 : (put_string(b, "true"), 0);
    case TREE: return r->at < r->end && *r->at == 0xc0 ? -1 : put_json(r, b, 0);
    case SLOTS: return put_slots(r, d);
    default: return -1;
    }
}

/* A map whose keys are among the fields, in their order. */
static int put_struct(Reader *r, Draft *d, const Field *fields, uint64_t demanded) {
    Value map, key;
    if (read_as(r, MAP, &map) || map.length < demanded) return -1;
    const Field *field = fields;
    for (uint64_t i = 0; i < map.length; i++, field++) {
        if (read_as(r, TEXT, &key)) return -1;
        while (field->key != NULL && !is_text(&key, field->key)) field++;
        if (field->key == NULL || (i < demanded && field != fields + i)) return -1;
        if (field->rule == TOKEN) {
            if (read_as(r, WHOLE, &key) || key.number < 0) return -1;
            const Hole hole = {d->line.used, key.number};
            put_bytes(&d->holes, &hole, sizeof hole);
            continue;
        }
        put_byte(&d->line, i ? ',' : '{');
        put_byte(&d->line, '"');
        put_string(&d->line, field->key);
        put_string(&d->line, "\":");
        if (put_field(r, d, field->rule)) return -1;
    }
    put_byte(&d->line, '}');
    return 0;
}

#endif
