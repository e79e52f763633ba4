/* One tensor -> one slot of a message, its values copied into the ring.
 *
 * Tensors are read through the table of functions that torch publishes for other array libraries (DLPack exchange API, torch
 * 2.10 and newer). It does not tell conjugate and negative bits, takes dtypes below a byte for whole ones, would make a lazy
 * clone a copy, and needs a millisecond to fail: such tensors are for the Python code (`care`), which is asked before.
 */
#define RECORDING "tensorprobe.fast.recording"
#define EXCHANGE "dlpack_exchange_api"
#define MOST_AXES 64
#define LONG_PATH 256
#define CAREFUL_FOR 1000 /* tensors, after the table has failed for one */

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous, *allocate, *export_owned, *import_owned;
    int (*view)(void *object, void *out);
    void *current_stream;
} Exchange;

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Viewed;

/* What C needs of Python, in the order of the tuple that `recording` is given; see quick.py. */
enum {
    R_SESSION, R_SIDE, R_WRITER, R_ACQUIRE, R_RELEASE, R_STACKS, R_WALKER, R_MEET, R_SINK, R_TRAINING, R_UNWRITTEN, R_IS_NEG, R_IS_LAZY,
    R_IS_GRAD_ENABLED, R_SEQUENCE_NUMBER, R_COUNT_MODES, R_SIZE_TYPE, RECORDING_PARTS
};

typedef struct {
    PyObject *context_capsule, *parts[RECORDING_PARTS];
    const Context *c;
    const Exchange *exchange;
    struct { PyObject *dtype; const char *name; size_t length; int64_t size; } rows[DTYPES]; /* by our code of the dtype */
    int careful; /* so many tensors are to be asked before the table is */
} Recording;

/* A call between its beginning and its end. */
typedef struct {
    Buffer arguments, slots;
    size_t n_slots;
    Buffer tokens; /* of int64: what was copied for its slots */
    PyObject *watched; /* list of (name, tensor): inputs that may require a gradient; NULL while there are none */
    PyObject *waiting; /* list of (place, slot): those whose statistics are still on a device */
    PyObject *others; /* roles: see look_outside */
    int lacked, outside, is_input, has_kwargs;
    PyObject *known;
} Open;

static PyObject *s_care, *s_states, *s_optimizer, *s_look_outside, *s_known_outside, *s_token, *s_summary;

static int dtype_code(const Viewed *d) {
    if (d->dtype.lanes != 1) return -1;
    const int bits = d->dtype.bits;
    switch (d->dtype.code) {
    case 0: return bits == 64 ? INT64 : bits == 32 ? INT32 : bits == 16 ? INT16 : bits == 8 ? INT8 : -1;
    case 1: return bits == 64 ? UINT64 : bits == 32 ? UINT32 : bits == 16 ? UINT16 : bits == 8 ? UINT8 : -1;
    case 2: return bits == 64 ? FLOAT64 : bits == 32 ? FLOAT32 : bits == 16 ? FLOAT16 : -1;
    case 4: return bits == 16 ? BFLOAT16 : -1;
    case 6: return bits == 8 ? BOOL : -1;
    default: return -1; /* complex, which may bear a conjugate bit, and what is rare */
    }
}

/* Whether the values are in row-major order; how many there are. */
static int in_order(const Viewed *d, int64_t *count) {
    int64_t expected = 1;
    int yes = 1;
    for (int i = d->ndim - 1; i >= 0; i--) {
        if (d->shape[i] != 1 && d->strides[i] != expected) yes = 0;
        expected *= d->shape[i];
    }
    *count = expected;
    return yes || expected == 0;
}

/* Whether strides permute a block without holes or overlap: elements.py says the same. */
static int is_block(const Viewed *d) {
    int order[MOST_AXES], used = 0;
    for (int i = 0; i < d->ndim; i++) {
        if (d->shape[i] == 1) continue;
        int at = used++;
        for (; at > 0 && d->strides[order[at - 1]] > d->strides[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    int64_t expected = 1;
    for (int i = 0; i < used; i++) {
        if (d->strides[order[i]] != expected) return 0;
        expected *= d->shape[order[i]];
    }
    return 1;
}

/* Values with any strides, in row-major order; where the next ones go comes back. */
static char *gather(char *to, const char *from, const Viewed *d, int axis, int64_t item) {
    if (axis == d->ndim) {
        memcpy(to, from, (size_t)item);
        return to + item;
    }
    const int64_t n = d->shape[axis], step = d->strides[axis] * item;
    if (axis < d->ndim - 1) {
        for (int64_t i = 0; i < n; i++, from += step) to = gather(to, from, d, axis + 1, item);
        return to;
    }
    if (item == 4) {
        for (int64_t i = 0; i < n; i++, from += step, to += 4) memcpy(to, from, 4);
    } else if (item == 2) {
        for (int64_t i = 0; i < n; i++, from += step, to += 2) memcpy(to, from, 2);
    } else {
        for (int64_t i = 0; i < n; i++, from += step, to += item) memcpy(to, from, (size_t)item);
    }
    return to;
}

static int lock_writer(const Recording *r) {
    PyObject *done = PyObject_CallFunctionObjArgs(r->parts[R_ACQUIRE], NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Keeps an error that is being raised. */
static void unlock_writer(const Recording *r) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *done = PyObject_CallFunctionObjArgs(r->parts[R_RELEASE], NULL);
    if (done == NULL) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

/* Copy the values into the ring: their token, -1 when there is no place now, -2 on error. */
static int64_t copy_values(const Recording *r, const Viewed *d, int whole, int code, int64_t count) {
    const Context *c = r->c;
    const int64_t item = r->rows[code].size, nbytes = count * item;
    int64_t token = -2, end;
    if (lock_writer(r)) return -2;
    const int64_t position = find_place(c, nbytes, &end);
    if (position < 0) {
        token = -1;
    } else {
        PyObject *piece = Py_BuildValue("(LLiO)", (long long)position, (long long)nbytes, code, Py_True);
        const char *from = (const char *)d->data + d->byte_offset;
        int failed = piece == NULL || find_place(c, nbytes, &end) != position; /* making the piece may have run other code */
        if (!failed && !whole) gather(c->ring + position % c->ring_size, from, d, 0, item);
        if (!failed) failed = put(c, piece, whole ? (unsigned long long)(uintptr_t)from : 0, position, nbytes, end);
        if (!failed) token = c->state[TOKENS] - 1;
        Py_XDECREF(piece);
    }
    unlock_writer(r);
    return token;
}

/* The second table of roles for this tensor, borrowed; NULL without an error when there is none. training.py does the same. */
static PyObject *table_outside(const Recording *r, Open *open, PyObject *key) {
    PyObject *training = r->parts[R_TRAINING];
    PyObject *optimizer = PyObject_GetAttr(training, s_optimizer);
    if (optimizer == NULL) return NULL;
    Py_DECREF(optimizer);
    if (optimizer != Py_None) { /* what is known of its states needs no look */
        PyObject *states = PyObject_GetAttr(training, s_states);
        if (states == NULL) return NULL;
        const int has = PyDict_Check(states) && (!open->is_input || PyDict_GetItemWithError(states, key) != NULL);
        if (has) {
            Py_XDECREF(open->others);
            open->others = states;
            return states;
        }
        Py_DECREF(states);
        if (PyErr_Occurred()) return NULL;
    }
    if (open->others != NULL && open->lacked) return open->others;
    PyObject *table = PyObject_CallMethodObjArgs(training, open->is_input ? s_look_outside : s_known_outside, key, NULL);
    if (table != NULL && !PyDict_Check(table)) {
        Py_DECREF(table);
        PyErr_SetString(PyExc_TypeError, "the second table is a dict");
        table = NULL;
    }
    if (table == NULL) return NULL;
    Py_XDECREF(open->others);
    open->others = table;
    open->lacked = PyDict_GetItemWithError(table, key) == NULL;
    return PyErr_Occurred() ? NULL : table;
}

/* The role of a tensor as a new reference; NULL without an error when it has none. */
static PyObject *find_role(const Recording *r, Open *open, PyObject *tensor) {
    if (open->known == NULL) return NULL;
    PyObject *key = PyLong_FromVoidPtr(tensor), *role = NULL;
    if (key == NULL) return NULL;
    PyObject *found = PyDict_GetItemWithError(open->known, key);
    for (int table = 0; table < 2 && role == NULL && !PyErr_Occurred(); table++) {
        if (table == 1) {
            PyObject *others = open->outside ? table_outside(r, open, key) : NULL;
            found = others == NULL ? NULL : PyDict_GetItemWithError(others, key);
        }
        Py_XINCREF(found); /* an owner that is asked may forget it */
        role = role_in(found, tensor);
        Py_XINCREF(role);
        Py_XDECREF(found);
    }
    Py_DECREF(key);
    if (role != NULL && PyErr_Occurred()) Py_CLEAR(role);
    return role;
}

static int append_pair(PyObject **list, PyObject *first, PyObject *second) {
    if (*list == NULL) *list = PyList_New(0);
    PyObject *pair = *list == NULL || first == NULL || second == NULL ? NULL : PyTuple_Pack(2, first, second);
    const int failed = pair == NULL || PyList_Append(*list, pair);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

static int note_token(Open *open, int64_t token) {
    if (token >= 0) put_bytes(&open->tokens, &token, sizeof token);
    return PyErr_Occurred() ? -1 : 0;
}

static int watch_input(Open *open, const char *path, size_t n, PyObject *tensor) {
    PyObject *name = PyUnicode_FromStringAndSize(path, (Py_ssize_t)n);
    const int failed = name == NULL || append_pair(&open->watched, name, tensor);
    Py_XDECREF(name);
    return failed ? -1 : 0;
}

/* A tensor that is not plain: Python makes its slot. `side.care(name, tensor, role)` gives (the slot, the slot as bytes). */
static int put_with_care(const Recording *r, Open *open, const char *path, size_t n, PyObject *tensor, PyObject *role) {
    PyObject *name = PyUnicode_FromStringAndSize(path, (Py_ssize_t)n);
    PyObject *made = name == NULL ? NULL : PyObject_CallMethodObjArgs(r->parts[R_SIDE], s_care, name, tensor, role == NULL ? Py_None : role, NULL);
    char *bytes;
    Py_ssize_t length;
    int failed = made == NULL || !PyTuple_Check(made) || PyTuple_Size(made) != 2 ||
                 PyBytes_AsStringAndSize(PyTuple_GetItem(made, 1), &bytes, &length) < 0;
    if (!failed) {
        PyObject *slot = PyTuple_GetItem(made, 0), *token = PyObject_GetAttr(slot, s_token), *summary = PyObject_GetAttr(slot, s_summary);
        failed = token == NULL || summary == NULL;
        if (!failed) failed = note_token(open, PyLong_AsLongLong(token));
        if (!failed && summary != Py_None) {
            PyObject *place = PyLong_FromSize_t(open->n_slots);
            failed = append_pair(&open->waiting, place, slot);
            Py_XDECREF(place);
        }
        if (!failed && open->is_input) failed = append_pair(&open->watched, name, tensor);
        put_bytes(&open->slots, bytes, (size_t)length);
        Py_XDECREF(token);
        Py_XDECREF(summary);
    }
    Py_XDECREF(name);
    Py_XDECREF(made);
    open->n_slots++;
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "care gives a slot and its bytes");
    return failed ? -1 : 0;
}

/* Whether the table may be asked about this tensor: 1 or 0, -1 on an error that is no torch's answer. */
static int may_view(Recording *r, PyObject *tensor) {
    int fine = 1;
    if (r->careful > 0) {
        r->careful--;
        PyObject *address = NULL;
        fine = is_true(PyObject_GetAttr(tensor, s_is_cpu)) == 1 && (address = ask(r->c, CONST_DATA_PTR, tensor)) != NULL;
        Py_XDECREF(address);
    }
    if (fine && r->parts[R_IS_LAZY] != Py_None)
        fine = is_true(PyObject_CallFunctionObjArgs(r->parts[R_IS_LAZY], tensor, NULL)) == 0;
    if (fine) fine = is_true(PyObject_CallFunctionObjArgs(r->parts[R_IS_NEG], tensor, NULL)) == 0;
    if (!PyErr_Occurred()) return fine;
    r->careful = CAREFUL_FOR;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}

/* 1: the slot was put. 0: the tensor needs care. -1: an error. */
static int put_plain(Recording *r, Open *open, const char *path, size_t n, PyObject *tensor, PyObject *role) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != r->c->tensor_type && type != r->c->parameter_type) return 0;
    const int fine = may_view(r, tensor);
    if (fine != 1) return fine;
    const int grad = is_true(PyObject_GetAttr(tensor, s_requires_grad));
    if (grad < 0) return -1;
    Viewed d = {0};
    if (r->exchange->view(tensor, &d)) {
        r->careful = CAREFUL_FOR;
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
        return 0;
    }
    const int code = dtype_code(&d);
    if (code < 0 || d.device.type != 1 || d.ndim >= MOST_AXES || d.strides == NULL || r->rows[code].size == 0) return 0;
    if (code == UINT8 || code == INT8) { /* dtypes below a byte are shown as these */
        PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
        Py_XDECREF(dtype);
        if (dtype == NULL) return -1;
        if (dtype != r->rows[code].dtype) return 0;
    }
    int64_t count;
    const int contiguous = in_order(&d, &count), whole = contiguous || is_block(&d);
    if (count && (uint64_t)(uintptr_t)d.data < LOW_ADDRESSES) { /* perhaps no memory, and this only an offset into none */
        unsigned long long offset;
        if (d.data == NULL || ask_number(r->c, STORAGE_OFFSET, tensor, &offset)) return PyErr_Occurred() ? -1 : 0;
        if ((uint64_t)(uintptr_t)d.data == offset * (uint64_t)r->rows[code].size) return 0;
    }
    if (count > r->c->largest / r->rows[code].size) return 0;
    for (int i = 0; !contiguous && i < d.ndim; i++) /* of these the table may give other strides than the tensor has */
        if (d.shape[i] == 1) return 0;
    /* The shape and the address hold until here: they are written down, and copied, before any other code may run. */
    const size_t before = open->slots.used;
    Buffer *b = &open->slots;
    put_map(b, 4 + !contiguous + grad + (role != NULL));
    PUT_KEY(b, "name");
    put_text(b, path, n);
    PUT_KEY(b, "dtype");
    put_text(b, r->rows[code].name, r->rows[code].length);
    PUT_KEY(b, "shape");
    put_array(b, (size_t)d.ndim);
    for (int i = 0; i < d.ndim; i++) put_number(b, d.shape[i]);
    if (!contiguous) {
        PUT_KEY(b, "stride");
        put_array(b, (size_t)d.ndim);
        for (int i = 0; i < d.ndim; i++) put_number(b, d.strides[i]);
    }
    if (grad) {
        PUT_KEY(b, "grad");
        put_bool(b, 1);
    }
    const int64_t token = copy_values(r, &d, whole, code, count);
    if (token < 0) {
        b->used = before;
        return token == -1 ? 0 : -1;
    }
    PUT_KEY(b, "token");
    put_number(b, token);
    if (note_token(open, token)) return -1;
    r->c->state[SLOTS_TAKEN] += 1;
    if (role != NULL) {
        PUT_KEY(b, "role");
        if (put_unicode(b, role)) return -1;
    }
    open->n_slots++;
    if (open->is_input && grad && watch_input(open, path, n, tensor)) return -1;
    return 1;
}

/* One tensor of a call; -1 on error. */
static int put_tensor(Recording *r, Open *open, const char *path, size_t n, PyObject *tensor) {
    PyObject *role = find_role(r, open, tensor);
    if (role == NULL && PyErr_Occurred()) return -1;
    int done = put_plain(r, open, path, n, tensor, role);
    if (done == 0) done = put_with_care(r, open, path, n, tensor, role);
    Py_XDECREF(role);
    return done < 0 ? -1 : 0;
}
